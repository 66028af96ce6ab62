import pytest

from pretrain.errors import UserError
from pretrain.launch import Launch, read_launch

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.7", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}


def test_alone() -> None:
    launch = read_launch({})
    assert (launch.launcher, launch.global_rank, launch.world_size) == ("alone", 0, 1)
    assert launch.master_port > 0


def test_torchrun() -> None:
    assert read_launch(TORCHRUN) == Launch("torchrun", 3, 4, 1, "127.0.0.7", 29500)


def test_srun() -> None:
    launch = read_launch(SRUN)
    assert launch == Launch("srun", 5, 8, 1, "localhost", launch.master_port)
    assert 20000 <= launch.master_port < 40000


def test_srun_ranks_agree_on_the_port_and_jobs_do_not() -> None:
    port = read_launch(SRUN).master_port
    assert read_launch({**SRUN, "SLURM_PROCID": "0"}).master_port == port
    assert read_launch({**SRUN, "SLURM_JOB_ID": "1234568"}).master_port != port
    assert read_launch({**SRUN, "SLURM_STEP_ID": "1"}).master_port != port


def test_torchrun_inside_srun_is_torchrun() -> None:
    assert read_launch({**SRUN, **TORCHRUN}).launcher == "torchrun"


def test_a_batch_script_is_alone() -> None:
    """Slurm sets SLURM_PROCID in the batch script as well; only srun starts a step."""
    assert read_launch({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).launcher == "alone"


def test_several_nodes_need_scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="scontrol is not on the PATH; set MASTER_ADDR"):
        read_launch({**SRUN, "SLURM_STEP_NODELIST": "node[3-4]"})
    assert (
        read_launch({**SRUN, "SLURM_STEP_NODELIST": "node[3-4]", "MASTER_ADDR": "localhost"}).master_addr == "localhost"
    )


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({**TORCHRUN, "RANK": "x"}, "RANK='x' in the environment is not a number"),
        ({**TORCHRUN, "RANK": "4"}, "gives process 4 of 4; processes count from 0 to 3"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "gives process 3 of 0"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not a port"),
        ({**TORCHRUN, "MASTER_ADDR": "no.such.host.invalid"}, "MASTER_ADDR=no.such.host.invalid is not a host"),
        ({name: value for name, value in SRUN.items() if name != "SLURM_PROCID"}, "SLURM_PROCID is not set"),
        ({**SRUN, "PRETRAIN_WORLD_SIZE": "16"}, "16 processes were asked for, but srun started 8"),
    ],
)
def test_incomplete(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_launch(environment)
