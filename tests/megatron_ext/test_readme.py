import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "megatron_ext" / "README.md"


def test_the_example_of_the_readme_runs_as_it_stands_and_learns(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    # From another folder: the installed package must do.
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+),", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.5 * losses[0]
