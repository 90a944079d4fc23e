"""Other implementations of ring attention that run on a CPU, each in an environment of its own.

`environments.py` installs them on demand, `processes.py` starts and asks them; `worker.py`, `jax_ring.py` and
`lucidrains.py` run inside. Nothing here is needed to train.
"""
