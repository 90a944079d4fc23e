"""The README's example is the code that runs."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ring_attention_without_the_rest(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "ring.attend" in block]
    (tmp_path / "example.py").write_text(example)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "example.py"]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    said = sorted(re.findall(r"rank \d of 4: out \[1", done.stdout))  # ranks may write into one another's lines
    assert said == [f"rank {r} of 4: out [1" for r in range(4)]
    assert len([line for line in example.splitlines() if line]) <= 15
