"""What is computed: the transformer and its attention kernels. Knows no rank, group or layout."""
