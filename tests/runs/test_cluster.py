"""The SLURM scripts against stand-ins for its commands: what they start, and what becomes of a job that is preempted.

No cluster: that SLURM delivers its signals as the scripts expect is taken from its manual.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support import REPOSITORY, recipes
from tests.support.files import read_rows
from tests.support.recipes import wait_until

SLURM = recipes.RECIPES / "slurm"
SCRIPTS = ("node.sh", "train.sbatch", "train_with_vllm_server.sbatch")

# Each writes down its arguments. `srun` runs what it is given for the last of its nodes, `scontrol` knows the nodes.
STAND_INS = {
    "srun": """
nodes=$(sed -E 's/.*--nodes ([0-9]+).*/\\1/' <<<"$*")
while [[ $1 == --* ]]; do case $1 in *=*) shift ;; *) shift 2 ;; esac; done
if [[ $1 == bash ]]; then exec sleep 30; fi
SLURM_NODEID=$((nodes - 1)) exec "$@"
""",
    "scontrol": """if [[ $1 == show ]]; then printf '%s\\n' ${3//,/ }; fi""",
    "accelerate": """exit ${ACCELERATE_EXIT:-0}""",
}


@pytest.fixture
def cluster(tmp_path):
    """Runs a script of a job on the nodes a, b and c; returns its exit code and the stand-ins' arguments by name."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in STAND_INS.items():
        record = f'"{sys.executable}" -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"'
        (folder / name).write_text(f'#!/usr/bin/env bash\n{record} >>"{tmp_path}/{name}"\n{body}\n')
        (folder / name).chmod(0o755)

    def run(script: str, *arguments: str, **environment: str):
        variables = {"SLURM_JOB_ID": "41007", "SLURM_JOB_NODELIST": "a,b,c", "SLURM_GPUS_ON_NODE": "4"}
        variables |= {"SLURM_CPUS_PER_TASK": "32", "SLURM_SUBMIT_DIR": str(REPOSITORY)}
        variables |= {"PATH": f"{folder}:{os.environ['PATH']}", **environment}
        pipes = {"capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run([str(SLURM / script), *arguments], cwd=tmp_path, env=variables, **pipes)
        names = [name for name in STAND_INS if (tmp_path / name).exists()]
        calls = {name: read_rows(tmp_path / name) for name in names}
        return done, calls

    return run


def values(arguments: list[str], *flags: str) -> tuple[str, ...]:
    """The value of each flag, which is given once."""
    assert all(arguments.count(f"--{flag}") == 1 for flag in flags)
    return tuple(arguments[arguments.index(f"--{flag}") + 1] for flag in flags)


@pytest.mark.parametrize("engine", ["fsdp2", "zero3", "multi_node"])
def test_every_node_launches_the_recipe(engine, cluster):
    """3 nodes of 4 GPUs, of which this is the last; the first is named; a port from the job's number."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    done, calls = cluster("train.sbatch", "aot", "runs/x", "--beta", "0.2", ENGINE=engine)
    assert done.returncode == 0, done.stderr
    (step,), (launch,) = calls["srun"], calls["accelerate"]
    assert values(step, "nodes", "ntasks", "ntasks-per-node") == ("3", "3", "1")
    assert values(launch, "config_file") == (str(REPOSITORY / "accelerate_configs" / f"{engine}.yaml"),)
    assert launch[-5:] == [str(recipes.RECIPES / "aot.py"), "--output_dir", "runs/x", "--beta", "0.2"]
    # accelerate's own parser reads the flags, and the file is of as many machines as the flags say.
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(launch[1:]))
    assert (arguments.num_machines, arguments.num_processes, arguments.machine_rank) == (3, 12, 2)
    assert (arguments.main_process_ip, arguments.main_process_port) == ("a", 21007)
    assert (arguments.use_deepspeed, arguments.use_fsdp) == (engine == "zero3", engine == "fsdp2")


@pytest.mark.parametrize(
    ("given", "parallel"),
    [({"VLLM_FLAGS": "--tensor_parallel_size 4"}, (4, 1)), ({}, (1, 4))],
    ids=["given", "default"],
)
def test_the_last_node_serves_vllm(given, parallel, cluster, monkeypatch):
    """The recipe parses what the script gives it, and TRL what serves."""
    from trl import TrlParser
    from trl.scripts.vllm_serve import ScriptArguments

    arguments = ("grpo", "runs/x", "org/model", "--seed", "3")
    done, calls = cluster("train_with_vllm_server.sbatch", *arguments, **given)
    assert done.returncode == 0, done.stderr
    serve, train = sorted(calls["srun"], key=lambda call: values(call, "nodelist"), reverse=True)
    assert values(serve, "nodelist", "nodes") == ("c", "1") and values(train, "nodelist", "nodes") == ("a,b", "2")
    (launch,), serve = calls["accelerate"], serve[serve.index("vllm-serve") + 1 :]
    assert values(launch, "num_machines", "num_processes") == ("2", "8")
    parsed, *_ = TrlParser(ScriptArguments).parse_args_into_dataclasses(serve)
    assert (parsed.model, parsed.host, parsed.port) == ("org/model", "0.0.0.0", 31007)
    assert (parsed.tensor_parallel_size, parsed.data_parallel_size) == parallel
    _, model, training = recipes.parse(monkeypatch, "grpo", *launch[launch.index("--output_dir") :], "--use_cpu")
    assert (model.model_name_or_path, training.seed) == ("org/model", 3)
    assert (training.use_vllm, training.vllm_mode) == (True, "server")
    assert (training.vllm_server_host, training.vllm_server_port) == ("c", 31007)
    assert (training.vllm_server_timeout, training.vllm_group_port) == (1200, 41007)


@pytest.mark.parametrize("script", SCRIPTS[1:])
@pytest.mark.parametrize(("code", "requeued"), [("0", False), ("1", False), ("143", True)])
def test_only_a_notice_requeues(script, code, requeued, cluster):
    done, calls = cluster(script, "grpo", "runs/x", "org/model", ACCELERATE_EXIT=code)
    assert done.returncode == int(code)
    assert (["requeue", "41007"] in calls["scontrol"]) is requeued


@pytest.mark.parametrize(("restarts", "began"), [("0", True), ("1", True), ("1", False)])
def test_a_requeued_job_resumes(restarts, began, cluster, tmp_path):
    """Where the run had come so far as to leave something; a first start must not pass over an earlier run."""
    if began:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "config.yaml").write_text("seed: 1\n")
    _, calls = cluster("train.sbatch", "aot", "run", SLURM_RESTART_COUNT=restarts)
    assert ("--resume_from_checkpoint" in calls["accelerate"][0]) is (restarts == "1" and began)


# A launcher with two workers in sessions of their own, as torchrun has, that save on TERM; its exit code is 1 then.
LAUNCHER = """
import pathlib, subprocess, sys, time
worker = '''
import pathlib, signal, sys, time
def save(*_):
    time.sleep(0.5)
    pathlib.Path(sys.argv[1]).write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1]).write_text("ready")
time.sleep(30)
'''
workers = [subprocess.Popen([sys.executable, "-c", worker, f"worker{i}"], start_new_session=True) for i in range(2)]
sys.exit(max(worker.wait() for worker in workers) and 1)
"""


def test_a_notice_reaches_the_workers_and_not_the_launcher(tmp_path):
    """Sent once to the whole process group of the task, as SLURM does; the launcher would die of it."""
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "accelerate").write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" "{tmp_path}/launcher.py"\n')
    (tmp_path / "accelerate").chmod(0o755)
    variables = {"ENGINE": "zero2", "NODES": "1", "GPUS": "2", "MAIN_NODE": "a", "MAIN_PORT": "1", "SLURM_NODEID": "0"}
    variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, **variables}
    task = subprocess.Popen([str(SLURM / "node.sh"), "aot"], cwd=tmp_path, env=environment, start_new_session=True)
    files = [tmp_path / "worker0", tmp_path / "worker1"]
    try:
        wait_until(lambda: all(file.exists() and file.read_text() == "ready" for file in files))
        os.killpg(task.pid, signal.SIGTERM)
        assert task.wait(timeout=30) == 143
    finally:
        task.kill()
    assert [file.read_text() for file in files] == ["saved", "saved"]
