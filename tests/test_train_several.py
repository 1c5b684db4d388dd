"""Several processes: what of accelerate's configuration is heeded, the precision, a fault of one of them, and
an --out that only the first sees."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

import train_drafter
from common.cli import UserError, run
from tests.scripts import ROOT, make_work
from train_drafter import NOT_HEEDED, check_configuration, choose_precision

FAST = ("--draft-vocab", "full", "--ttt-steps", 2, "--batch-tokens", 60, "--max-steps", 4, "--eval-every", 2)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return make_work(tmp_path_factory.mktemp("several"), 14, 12, 100)


def torchrun(*arguments):
    """(exit code, output) of two processes of this file's main()."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m",
               "tests.test_train_several", *arguments]
    done = subprocess.run([str(word) for word in command], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                          stderr=subprocess.STDOUT, timeout=170,
                          env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"})
    return done.returncode, done.stdout


def main():
    """In each of two processes: a training whose second process sees no --out; with a kind of fault, that one
    has it in its second step."""
    kind, out, *arguments = sys.argv[1:]
    second = train_drafter.RANK == 1
    sys.argv = ["train_drafter.py", *arguments, *([] if second else ["--out", out])]
    load, name = train_drafter.load_step, os.uname().nodename

    def faulty(training, number, *more):
        if number == 1 and kind == "user":
            raise UserError(f"the disk of {name} is upside down; turn it")
        if number == 1 and kind == "bug":
            raise ValueError("five is no four")
        if number == 1 and kind == "killed":
            os.kill(os.getpid(), 9)
        return load(training, number, *more)

    if second:
        train_drafter.load_step = faulty
    run(train_drafter.main)


@pytest.mark.parametrize(("kind", "words"), [
    ("user", "is upside down; turn it\n"),
    pytest.param("bug", "ValueError, of which its output tells more\n", marks=pytest.mark.slow),
    pytest.param("killed", None, marks=pytest.mark.slow),
])
def test_a_fault_of_one_process_ends_all_with_one_sentence(work, tmp_path, kind, words):
    code, said = torchrun(kind, tmp_path / "out", "--shards", work / "shards", "--target", work / "target",
                             *FAST)
    ours = [line for line in said.splitlines() if line.startswith("train_drafter.py: ")]
    assert code != 0 and len(ours) == (words is not None), said[-3000:]
    if words:
        assert f"train_drafter.py: process 1 of {os.uname().nodename}: " in said and words in said
    if kind != "bug":
        assert "RuntimeError" not in said


def test_only_the_first_process_sees_the_output_folder(work, tmp_path):
    """And what is resumed, by one process's checkpoint, goes on as what went through."""
    arguments = ("--shards", work / "shards", "--target", work / "target", *FAST)
    last = tmp_path / "out" / "checkpoints" / "step-000004"
    weights = []
    for _ in range(2):
        code, said = torchrun("well", tmp_path / "out", *arguments, "--resume")
        assert code == 0, said[-3000:]
        weights.append((last / "state" / "weights.safetensors").read_bytes())
        shutil.rmtree(last)
    assert "going on after step 2" in said and weights[0] == weights[1]


@pytest.mark.parametrize(("variable", "value", "fault"), [
    ("ACCELERATE_USE_DEEPSPEED", "true", "refused"), ("ACCELERATE_USE_MEGATRON_LM", "true", "refused"),
    ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "refused"), ("FSDP_OFFLOAD_PARAMS", "true", "refused"),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "refused"),
    ("FSDP_ACTIVATION_CHECKPOINTING", "true", "refused"), ("FSDP_IGNORED_MODULES", "fc", "refused"),
    ("FSDP_VERSION", "1", "warned"), ("FSDP_SHARDING_STRATEGY", "HYBRID_SHARD", "warned"),
    ("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP", "warned"),
    ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "warned"),
    ("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT", "warned"),
    ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true", "warned"),
    ("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT", None), ("ACCELERATE_DYNAMO_BACKEND", "NO", None),
    ("FSDP_OFFLOAD_PARAMS", "false", None),
])
def test_what_accelerates_configuration_says_in_vain_is_named(monkeypatch, capsys, variable, value, fault):
    assert variable in {row[0] for row in NOT_HEEDED}
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv(variable, value)
    if fault == "refused":
        name = variable.removeprefix("ACCELERATE_").lower()
        with pytest.raises(UserError, match=f"says {name} {value}, which is not supported: "):
            check_configuration()
        return
    check_configuration()
    assert capsys.readouterr().err.count("which is not heeded") == (fault == "warned")
    if variable.startswith("FSDP_"):
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
        check_configuration()
        assert not capsys.readouterr().err


@pytest.mark.parametrize(("asked", "configured", "gpu", "tokens", "wanted"), [
    (None, None, False, None, "no"), (None, "no", True, None, "bf16"), ("no", "bf16", True, None, "no"),
    (None, "bf16", False, None, "bf16"), ("bf16", "fp16", False, None, "bf16"),
    (None, None, False, 9, "bf16"), (None, "fp8", True, None, UserError),
])
def test_bfloat16_is_the_default_on_a_gpu(monkeypatch, asked, configured, gpu, tokens, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: gpu)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    if configured:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", configured)
    args = type("Args", (), {"mixed_precision": asked, "tokens": tokens})
    if wanted is UserError:
        with pytest.raises(UserError, match="mixed precision fp8, which is not supported"):
            choose_precision(args)
    else:
        assert choose_precision(args) == wanted


if __name__ == "__main__":
    main()
