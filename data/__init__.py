"""Documents become token shards; shards become sequences; each rank reads only the slices it holds."""
