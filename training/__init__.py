"""How a run is driven: ranks, loop, checkpoints, metrics. Imports all other rooms; scripts import it."""
