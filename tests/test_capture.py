"""Extraction from SGLang: the hook without an engine, every trap with a server that is not one, and SGLang
itself in both ways.

SGLANG_PYTHON names the Python of an environment with SGLang (.ci/run makes it); without it the last tests
skip.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from common import capture_hook
from common import sglang as capture
from common.sglang import HOOK, NEUTRAL, SGLang, server_command, wait_for_server
from common.shards import Shards
from common.target import open_target
from common.target_model import TargetModel
from tests import tiny
from tests.scripts import EXACT, ROOT, call
from tests.test_serve import Fake, refused

CPU = ("--device cpu --max-total-tokens 2048 --max-running-requests 8 --mem-fraction-static 0.3 "
       "--prefill-attention-backend intel_amx --decode-attention-backend intel_amx "
       "--disable-decode-cuda-graph")
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "stop_ids": [2]}
LAYERS = [2, 4, 5]
# Of the norm of a row. The engine's kernels add up in another order than transformers'; seen: 4e-7
TOLERANCE = 1e-5


def batch_of(rids, counts, extend=True, verify=False):
    """What the hook reads of SGLang's ForwardBatch."""
    mode = SimpleNamespace(is_extend=lambda: extend, is_target_verify=lambda: verify)
    return SimpleNamespace(rids=rids, extend_seq_lens_cpu=counts, forward_mode=mode)


def wait_for(*paths):
    deadline = time.monotonic() + 10
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{paths} did not come"
        time.sleep(0.005)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_hook_writes_each_prompt_of_ours_by_its_name(tmp_path, dtype):
    tmp_path /= "made"
    hook = capture_hook.write_states({"folder": str(tmp_path)})
    states = torch.randn(12, 4, 8).to(dtype)  # [N, three layers and the last, H]
    batch = batch_of(["states-a-0", "somebody", "states-a-1"], [3, 4, 2, 0, 0])
    # padded: rows 9.. and two counts belong to nobody
    args = (None, states[:, 3].contiguous(), None, batch, [states[:, n].contiguous() for n in range(3)])
    hook(None, args, None)
    wait_for(tmp_path / "states-a-0.safetensors", tmp_path / "states-a-1.safetensors")
    for name, rows in (("states-a-0", slice(0, 3)), ("states-a-1", slice(7, 9))):
        found = load_file(tmp_path / f"{name}.safetensors")
        for n, key in enumerate(("aux0", "aux1", "aux2", "last")):
            assert torch.equal(found[key], states[rows, n])
    # some models hand over one tensor
    packed = (*args[:3], batch_of(["states-a-2"], [12]), states[:, :3].flatten(1))
    hook(None, packed, None)
    wait_for(tmp_path / "states-a-2.safetensors")
    assert torch.equal(load_file(tmp_path / "states-a-2.safetensors")["aux0"], states[:, :3].flatten(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"states-a-{n}.safetensors" for n in range(3)]


def test_the_hook_writes_nothing_else(tmp_path, monkeypatch):
    hook = capture_hook.write_states({"folder": str(tmp_path)})
    last, *aux = torch.randn(4, 2, 8)
    decoding = batch_of(["states-a-0", "states-a-1"], None, extend=False)
    hook(None, (None, last, None, decoding, aux), None)
    hook(None, (None, last, None, batch_of(["states-a-0"], [2], verify=True), aux), None)
    hook(None, (None, last, None, batch_of(None, [2]), aux), None)  # the engine's own warm-up
    hook(None, (None, last, None, batch_of(["states-a-0"], [2]), None), None)
    hook(None, (None, last, None, batch_of(["states-../a", "states-/tmp/a"], [1, 1]), aux), None)
    with monkeypatch.context() as second_rank:
        second_rank.setattr(torch.distributed, "is_initialized", lambda: True)
        second_rank.setattr(torch.distributed, "get_rank", lambda: 1)
        hook(None, (None, last, None, batch_of(["states-a-0"], [2]), aux), None)
    hook(None, (None, last, None, batch_of(["states-a-9"], [2]), aux), None)
    wait_for(tmp_path / "states-a-9.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["states-a-9.safetensors"]


def test_the_hook_tells_what_it_cannot_write(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(capture_hook, "save_file", full)
    hook = capture_hook.write_states({"folder": str(tmp_path)})
    last, *aux = torch.randn(4, 2, 8)
    hook(None, (None, last, None, batch_of(["states-a-0"], [2]), aux), None)
    wait_for(tmp_path / "states-a-0.error")
    assert [path.name for path in tmp_path.iterdir()] == ["states-a-0.error"]


@pytest.mark.parametrize("fault", ["save_file", "copied"])
def test_a_fault_of_the_hooks_writer_is_told_and_does_not_stop_the_engine(tmp_path, monkeypatch, fault):
    """More batches than may wait: none is waited for in vain."""
    def broken(*_):
        raise RuntimeError("CUDA error")

    hook = capture_hook.write_states({"folder": str(tmp_path)})
    last, *aux = torch.randn(4, 2, 8)
    monkeypatch.setattr(capture_hook, "save_file", broken)
    if fault == "copied":  # what is handed over has no rows
        state = SimpleNamespace(is_cuda=False, clone=lambda: None)
        last = SimpleNamespace(is_cuda=False, detach=lambda: state)
    names = [f"states-a-{number}" for number in range(3 * capture_hook.WAITING)]
    for name in names:
        hook(None, (None, last, None, batch_of([name], [2]), aux), None)
    wait_for(*(tmp_path / f"{name}.error" for name in names))
    assert "Error: " in (tmp_path / f"{names[-1]}.error").read_text()
    assert len(list(tmp_path.iterdir())) == len(names)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny.make_target(tmp_path_factory.mktemp("capture") / "target", seed=3, head_dim=32)
    return TargetModel(open_target(folder), LAYERS, "float32", device="cpu")


def info(folder, **changes):
    """What a server of ours says of itself."""
    return {"model_path": "T", "dtype": "float32", "speculative_algorithm": None,
            "speculative_draft_model_path": None, "version": "0.5.23", "aux_hidden_state_capture": "eagle3",
            "return_aux_hidden_state_layer_ids": None, "disable_radix_cache": True,
            "chunked_prefill_size": -1,
            "cuda_graph_config": {"prefill": {"backend": "disabled"}, "decode": {"backend": "full"}},
            "enable_dp_attention": False, "context_length": 72, "max_req_input_len": 66,
            "forward_hooks": [{"name": "states", "hook_factory": HOOK, "config": {"folder": str(folder)}}],
            **changes}


def fake_server(model, folder, changes=None, before=lambda aux, last, tokens: (aux, last, tokens)):
    """A server of `model` that hands states over as our hook does. before(aux, last, ids): spoils what it
    gives."""
    hook, one_at_a_time = capture_hook.write_states({"folder": str(folder)}), threading.Lock()

    def generate(body):
        ids, sampling = [], body["sampling_params"]
        stops = set(sampling.get("stop_token_ids", ()))
        while len(ids) < sampling["max_new_tokens"] and not set(ids) & stops:
            with one_at_a_time:
                aux, last = (part[0] for part in model.states(torch.tensor([body["input_ids"] + ids])))
            ids.append(int(model.argmax(last[-1:])))
        aux, last, ids = before(aux, last, ids)
        if aux is not None:
            batch = batch_of([body.get("rid", "none")], [len(last)])
            hook(None, (None, last, None, batch, list(aux.chunk(3, -1))), None)
        reason = "length" if len(ids) == sampling["max_new_tokens"] else "stop"
        return 200, {"output_ids": ids, "meta_info": {"finish_reason": {"type": reason}}}

    return Fake({"/server_info": (200, info(folder, **(changes or {}))), "/generate": generate})


def test_states_and_answers_of_a_server(model, tmp_path):
    target = model.target
    samples = [torch.randint(3, 300, (count,)).tolist() for count in (40, 1, 64, 7)]
    with fake_server(model, tmp_path) as fake, SGLang(target, LAYERS, "auto", 64, fake.url) as sglang:
        for ids, (aux, last) in zip(samples, sglang.states(samples), strict=True):
            wanted, wanted_last = model.states(torch.tensor([ids]))
            assert torch.equal(aux, wanted[0]) and torch.equal(last, wanted_last[0])
            assert torch.equal(sglang.lm_head(last), model.lm_head(last))
        assert not list(tmp_path.iterdir())  # read and gone
        assert len({body["rid"] for path, body in fake.seen if path == "/generate"}) == 2 + len(samples)
        fake.seen.clear()
        told, limits = [], [5, 9, 3, 1]
        sampling = {**GREEDY, "temperature": 0.7, "top_k": 4}
        answers = sglang.answer(samples, limits, sampling, [11, 12, 13, 14], told.append)
        assert sorted(told) == sorted(answers)
        assert all(len(ids) == limit or ids[-1] == 2 for ids, limit in zip(answers, limits, strict=True))
        asked = [body for _, body in sorted(fake.seen, key=lambda seen: samples.index(seen[1]["input_ids"]))]
        assert all("rid" not in body for body in asked)
        assert [body["sampling_params"]["sampling_seed"] for body in asked] == [11, 12, 13, 14]
        assert asked[1]["sampling_params"] == {"temperature": 0.7, "top_p": 1.0, "top_k": 4,
                                               "max_new_tokens": 9, "stop_token_ids": [2],
                                               "sampling_seed": 12, **NEUTRAL}
        assert sglang.answer([], [], GREEDY, []) == [] and sglang.states([]) == []


def test_requests_of_further_batches_are_under_way_while_one_is_taken(model, tmp_path):
    batches = [[torch.randint(3, 300, (count,)).tolist() for count in counts]
               for counts in ([9, 8], [7, 7, 7], [5], [4, 3], [2], [1, 1])]
    wanted = [[model.states(torch.tensor([ids])) for ids in samples] for samples in batches]
    with fake_server(model, tmp_path) as fake, SGLang(model.target, LAYERS, "auto", 64, fake.url) as sglang:
        fake.seen.clear()
        flow = sglang.flow(batches)
        for number in range(len(batches)):
            found = next(flow)
            sent = sum(map(len, batches[: number + 1 + capture.AHEAD]))
            deadline = time.monotonic() + 10
            while len(fake.seen) < sent and time.monotonic() < deadline:
                time.sleep(0.005)
            assert len(fake.seen) == sent
            for part, theirs in zip(found, wanted[number], strict=True):
                assert all(torch.equal(state, other[0]) for state, other in zip(part, theirs, strict=True))
        assert next(flow, None) is None and not list(tmp_path.iterdir())


SETTINGS = [  # what the server says of itself, what is said of it
    ({"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "D"}, "runs a drafter"),
    ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE"),
    ({"aux_hidden_state_capture": None}, "--enable-return-aux-hidden-states --speculative-algorithm EAGLE3"),
    ({"aux_hidden_state_capture": "dflash"}, "--speculative-algorithm EAGLE3"),
    ({"return_aux_hidden_state_layer_ids": [1, 2, 3]}, "layers [1, 2, 3]"),
    ({"forward_hooks": None}, "no hook"),
    ({"forward_hooks": [{"hook_factory": "other:hook"}]}, "--forward-hooks"),
    ({"disable_radix_cache": False}, "--disable-radix-cache"),
    ({"chunked_prefill_size": 8192}, "--chunked-prefill-size -1"),
    ({"cuda_graph_config": {"prefill": {"backend": "full"}}}, "--disable-prefill-cuda-graph"),
    ({"enable_dp_attention": True}, "--enable-dp-attention"),
    ({"attn_dp_size": 8}, "--attention-data-parallel-size (attn_dp_size is 8)"),
    ({"pp_size": 2}, "--pipeline-parallel-size"), ({"attn_cp_size": 2}, "rank 0 has only a part of the rows"),
    ({"enable_layernorm_sp": True}, "no --enable-layernorm-sp"),
    ({"context_length": 60}, "--max-length 57"),
    ({"max_req_input_len": 50}, "--max-length 53"),
]


ODD = [  # what no SGLang says of itself
    ({"context_length": "72"}, 'context_length "72", an integer'),
    ({"max_req_input_len": 66.5}, "max_req_input_len 66.5"),
    ({"chunked_prefill_size": "-1"}, "chunked_prefill_size"), ({"forward_hooks": {"a": 1}}, "forward_hooks"),
    ({"forward_hooks": [None, "a", {"hook_factory": HOOK}]}, "no hook"),
    ({"cuda_graph_config": [1]}, "cuda_graph_config [1]"),
    ({"cuda_graph_config": {"prefill": "full"}}, 'cuda_graph_config.prefill "full", an object'),
    ({"speculative_algorithm": ["EAGLE3"]}, "speculative_algorithm"),
]


@pytest.mark.parametrize(("changes", "words"), ODD)
def test_a_server_that_says_odd_things_of_itself_is_refused(model, tmp_path, changes, words):
    with fake_server(model, tmp_path, changes) as fake:
        refused(lambda: SGLang(model.target, LAYERS, "auto", 64, fake.url), fake.url, words)


@pytest.mark.parametrize(("changes", "words"), SETTINGS)
def test_a_server_that_was_started_otherwise_is_refused_at_once(model, tmp_path, changes, words):
    with fake_server(model, tmp_path, changes) as fake:
        refused(lambda: SGLang(model.target, LAYERS, "auto", 64, fake.url), fake.url, words, "start it with")
        assert [path for path, _ in fake.seen] == ["/server_info"]


def test_other_layers_are_asked_for_by_the_engines_numbers(model, tmp_path):
    flag = "--return-aux-hidden-state-layer-ids 0 3 6"
    assert f"{flag} " in server_command(model.target, [1, 4, 7], "auto", 64, tmp_path)
    assert "--return-aux" not in server_command(model.target, LAYERS, "auto", 64, tmp_path)
    with fake_server(model, tmp_path) as fake:
        refused(lambda: SGLang(model.target, [1, 4, 7], "auto", 64, fake.url), flag)


PROBES = [  # what a server hands over, what is said of it
    (lambda aux, last, ids: (None, None, ids), "its hook did not run or writes elsewhere"),
    (lambda aux, last, ids: (aux[5:], last[5:], ids), "59 rows of states for 64 tokens"),
    (lambda aux, last, ids: (aux[:, :96], last[:, :32], ids), "states of 32 and 96"),
    (lambda aux, last, ids: (aux[:, :64], last, ids), "states of 64 and 64"),
    (lambda aux, last, ids: (aux.bfloat16(), last.bfloat16(), ids), "--dtype float32"),
    (lambda aux, last, ids: (aux, last, [ids[0] + 1]), "another target"),
    (lambda aux, last, ids: (aux, last, [100000]), "token 100000"),
    (lambda aux, last, ids: (aux, last, [float(ids[0])]), "output_ids hold"),
    (lambda aux, last, ids: (aux, last, []), "no output_ids"),
    (lambda aux, last, ids: (aux, last * torch.nan, ids), "another target"),
]


@pytest.mark.parametrize(("spoil", "words"), PROBES)
def test_what_a_server_hands_over_is_probed_first(model, tmp_path, monkeypatch, spoil, words):
    monkeypatch.setattr(capture, "PATIENCE", 0.2)
    with fake_server(model, tmp_path, before=spoil) as fake:
        refused(lambda: SGLang(model.target, LAYERS, "auto", 64, fake.url), fake.url, words)
    assert not list(tmp_path.iterdir())


def test_a_prefix_cache_shows_when_the_probe_is_repeated(model, tmp_path):
    seen = []

    def cached(aux, last, ids):
        seen.append(1)
        return (aux, last, ids) if len(seen) == 1 else (aux[-1:], last[-1:], ids)

    with fake_server(model, tmp_path, before=cached) as fake:
        refused(lambda: SGLang(model.target, LAYERS, "auto", 64, fake.url), "1 rows of states for 64 tokens",
                "--disable-radix-cache")


def test_a_folder_that_is_not_here_or_is_full(model, tmp_path, monkeypatch):
    elsewhere = [{"hook_factory": HOOK, "config": {"folder": str(tmp_path / "there")}}]
    with fake_server(model, tmp_path, {"forward_hooks": elsewhere}) as fake:
        refused(lambda: SGLang(model.target, LAYERS, "auto", 64, fake.url), "no folder here",
                "--states-folder")
    monkeypatch.setattr(capture, "PATIENCE", 0.2)
    (tmp_path / "here").mkdir()
    # another folder of the same name, as on a machine that shares nothing
    with fake_server(model, tmp_path) as fake:
        refused(lambda: SGLang(model.target, LAYERS, "auto", 64, fake.url, tmp_path / "here"),
                "no states came to")

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(capture, "PATIENCE", 60)
    monkeypatch.setattr(capture_hook, "save_file", full)
    with fake_server(model, tmp_path) as fake:
        refused(lambda: SGLang(model.target, LAYERS, "auto", 64, fake.url), "No space left on device")


def test_another_version_is_warned_of_and_none_is_refused(model, tmp_path, capsys):
    with fake_server(model, tmp_path, {"version": "0.6.1"}) as fake:
        SGLang(model.target, LAYERS, "auto", 64, fake.url).close()
    assert "SGLang 0.6.1, tried was 0.5.23" in capsys.readouterr().err
    refused(lambda: SGLang(model.target, LAYERS, "auto", 64), "SGLang cannot be imported", "--server-url",
            "--backend hf")


def prepare(work, kind, layers, *more):
    """Shards of transformers' in work/hf. Returns (arguments of the extraction, environment of SGLang's
    processes)."""
    if not os.environ.get("SGLANG_PYTHON"):
        pytest.skip("SGLANG_PYTHON is not set; it names the Python of an environment with SGLang, as .ci/run "
                    "makes it")
    tiny.make_target(work / "target", kind, seed=3, head_dim=32)
    rows = tiny.conversations(20)
    rows[3]["messages"][1]["content"] *= 8
    tiny.write_rows(work / "rows.jsonl", rows)
    arguments = ["--target", work / "target", "--data", work / "rows.jsonl", "--layers", layers,
                 "--dtype", "float32", "--max-length", 256, "--max-new-tokens", 24, *more]
    call("extract_hidden_states", *EXACT, *arguments, "--out", work / "hf")
    return arguments, {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "sgl_shim"),
                       "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@contextmanager
def running(command, environment, log):
    """The URL of a server that a printed command starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = command.replace("python -m", f"{shlex.quote(os.environ['SGLANG_PYTHON'])} -m")
    command = command.replace("PYTHONPATH=", f"PYTHONPATH={environment['PYTHONPATH']}:")  # and the stand-in's
    command += f" --host 127.0.0.1 --port {port}"
    with open(log, "wb") as output:
        process = subprocess.Popen(command, shell=True, env=environment, stdout=output, stderr=output,
                                   start_new_session=True)
    try:
        wait_for_server(process, f"http://127.0.0.1:{port}", log, 300)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def check_equal(ours, theirs):
    """The same samples with the same ids and choices, and states that differ by rounding only."""
    ours, theirs = Shards(ours), Shards(theirs)
    assert len(ours.index) == len(theirs.index) > 15
    for number in range(len(ours.index)):
        a, b = ours.sample(number), theirs.sample(number)
        assert a.keys() == b.keys()
        for name in ("input_ids", "loss_mask", "target_argmax"):
            assert torch.equal(a[name], b[name])
        for name in {"aux_hidden_states", "last_hidden_state"} & a.keys():
            parts = [tensor.float().unflatten(1, (-1, 64)) for tensor in (a[name], b[name])]  # [T, layers, H]
            away = (parts[0] - parts[1]).norm(dim=-1) / parts[0].norm(dim=-1)
            assert away.max() < 0.004  # stored in bfloat16, of which one in 256 may be another
            assert away.mean() < 2e-4


def test_extraction_in_process(tmp_path):
    arguments, environment = prepare(tmp_path, "llama", "auto")
    command = [os.environ["SGLANG_PYTHON"], ROOT / "extract_hidden_states.py", "--backend", "sglang", *EXACT,
               *arguments, "--out", tmp_path / "sglang", "--server-arguments", CPU]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment,
                          cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["samples"] == 20
    check_equal(tmp_path / "hf", tmp_path / "sglang")


def test_extraction_from_a_server(tmp_path):
    arguments, environment = prepare(tmp_path, "qwen3", "1,4,7", "--regenerate")
    target, layers = open_target(tmp_path / "target"), [1, 4, 7]
    command = server_command(target, layers, "float32", 256, tmp_path / "states", shlex.split(CPU))
    with running(command, environment, tmp_path / "log") as url:
        call("extract_hidden_states", *EXACT, *arguments, "--backend", "sglang", "--server-url", url,
             "--out", tmp_path / "sglang")
        check_equal(tmp_path / "hf", tmp_path / "sglang")
        model = TargetModel(target, layers, "float32", device="cpu")
        generator = torch.Generator().manual_seed(0)
        samples = [torch.randint(3, 300, (count,), generator=generator).tolist()
                   for count in (40, 1, 256, 7, 130)]
        with SGLang(target, layers, "float32", 256, url) as sglang:
            for ids, found in zip(samples, sglang.states(samples), strict=True):
                for part, wanted in zip(found, model.states(torch.tensor([ids])), strict=True):
                    part, wanted = (states.unflatten(-1, (-1, 64)) for states in (part, wanted[0]))
                    assert ((part - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < TOLERANCE
    assert not list((tmp_path / "states").iterdir())
