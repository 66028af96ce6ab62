import re
import subprocess
import sys
from pathlib import Path

from megatron_ext import SCHEMES

README = Path(__file__).parents[2] / "megatron_ext" / "README.md"


def outputs(tmp_path: Path) -> list[str]:
    """What each of the README's examples prints, run from another folder: the installed package must do."""
    printed = []
    for example in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL):
        script = tmp_path / "example.py"
        script.write_text(example)
        done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    return printed


def test_the_examples_of_the_readme_run_as_they_stand(tmp_path: Path) -> None:
    training, schemes = outputs(tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+),", training)]
    assert len(losses) == 4
    assert losses[-1] < 0.5 * losses[0]
    assert [line.split()[0] for line in schemes.splitlines()] == list(SCHEMES)


def test_the_readme_lists_every_scheme() -> None:
    table = README.read_text().partition("## Schemes")[2].partition("## Files")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(SCHEMES)
