"""SGLang servers: what is refused, how counters are read, how servers start and stop. One test runs SGLang
itself."""

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import transformers

from common.cli import UserError
from common.drafter import Drafter, drafter_config, save_drafter
from common.sglang import (
    NEUTRAL,
    answer,
    count_verifications,
    serve_commands,
    server_settings,
    start_server,
)
from common.target import default_layers, open_target
from tests import tiny

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
INFO = {"model_path": "T", "dtype": "float32", "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "D", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4, "tp_size": 1, "version": "0.5.23", "max_running_requests": 8,
        "context_length": 512, "max_req_input_len": 506}
CPU = shlex.split("--device cpu --context-length 256 --max-total-tokens 2048 --max-running-requests 4 "
                  "--mem-fraction-static 0.3 --prefill-attention-backend intel_amx "
                  "--decode-attention-backend intel_amx --disable-cuda-graph")


class Fake:
    """A server that answers like SGLang: `replies` maps a path to (status, value) or to a function of the
    request's body."""

    def __init__(self, replies):
        self.seen = []  # (path, body) of every request
        self.running, self.most = 0, 0  # requests in flight now, and at most
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler):
                body = json.loads(handler.rfile.read(int(handler.headers.get("Content-Length", 0))) or "null")
                with lock:
                    self.seen.append((handler.path, body))
                    self.running += 1
                    self.most = max(self.most, self.running)
                reply = replies.get(handler.path.split("?")[0], (404, "Not Found"))
                status, value = reply(body) if callable(reply) else reply
                with lock:
                    self.running -= 1
                text = (value if isinstance(value, str) else json.dumps(value)).encode()
                handler.send_response(status)
                handler.send_header("Content-Length", str(len(text)))
                handler.end_headers()
                handler.wfile.write(text)

            do_POST = do_GET

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def facts(*histogram, reason="length", **more):
    """meta_info of an answer whose verifications accepted 0, 1, ... drafts so many times."""
    return {"finish_reason": {"type": reason}, "num_retractions": 0, "spec_verify_ct": sum(histogram),
            "spec_num_correct_drafts": sum(n * times for n, times in enumerate(histogram)),
            "spec_correct_drafts_histogram": list(histogram), **more}


def refused(function, *words):
    """`function` ends with one sentence for people that holds `words`."""
    with pytest.raises(UserError) as error:
        function()
    assert "\n" not in str(error.value) and all(str(word) in str(error.value) for word in words), error.value


def ask(generate, prompts=((5, 6),), limit=4, eos_ids=(2,), concurrency=1, steps=3,
        flush=(200, "Cache flushed.")):
    with Fake({"/generate": generate, "/flush_cache": flush}) as fake:
        return answer(fake.url, [list(ids) for ids in prompts], limit, set(eos_ids), concurrency, GREEDY,
                      steps), fake


def test_settings_are_read_from_either_address():
    for path in ("/server_info", "/get_server_info"):
        with Fake({path: (200, INFO)}) as fake:
            found = server_settings(fake.url, True)
        wanted = {"steps": 3, "topk": 1, "draft_tokens": 4, "drafter": "D", "model": "T"}
        assert found == found | wanted
        assert found["context_length"] == 512 and found["room"] == 508 and found["version"] == "0.5.23"
    none = ("speculative_algorithm", "speculative_draft_model_path", "speculative_num_draft_tokens")
    plain = {**INFO, **dict.fromkeys(none), "max_req_input_len": 194}
    with Fake({"/server_info": (200, plain)}) as fake:  # a KV pool of 200 tokens
        assert server_settings(fake.url, False)["room"] == 198


@pytest.mark.parametrize("expected, change, words", [
    (True, {"speculative_algorithm": "EAGLE"}, ["EAGLE,", "never accepted", "EAGLE3"]),
    (True, {"speculative_algorithm": "NGRAM"}, ["NGRAM"]),
    (True, {"speculative_algorithm": None}, ["without a drafter", "--speculative-draft-model-path"]),
    (True, {"speculative_draft_model_path": None}, ["EAGLE3 without a drafter"]),
    (False, {}, ["decode plainly", "EAGLE3"]),
])
def test_servers_with_the_wrong_drafter_are_refused(expected, change, words):
    with Fake({"/server_info": (200, {**INFO, **change})}) as fake:
        refused(lambda: server_settings(fake.url, expected), fake.url, *words)


def test_what_is_no_sglang_server_is_refused():
    with Fake({}) as fake:
        refused(lambda: server_settings(fake.url, True), fake.url, "no SGLang server", 404)
    refused(lambda: server_settings(fake.url, True), fake.url, "does not answer", "refused")  # it is down now
    refused(lambda: server_settings("localhost:30000", True), "localhost:30000", "http://HOST:PORT")
    with Fake({"/server_info": (200, {"version": "1"})}) as fake:
        refused(lambda: server_settings(fake.url, False), "no SGLang server")


@pytest.mark.parametrize("change", [{"speculative_num_draft_tokens": "4"}, {"context_length": [512]},
                                    {"dtype": 3}, {"model_path": {}}])
def test_odd_settings_are_named(change):
    with Fake({"/server_info": (200, {**INFO, **change})}) as fake:
        refused(lambda: server_settings(fake.url, True), fake.url, *change, json.dumps(*change.values()))
    for info in ([1], None, "x", "[" * 10**5):
        with Fake({"/server_info": (200, info)}) as fake:
            refused(lambda: server_settings(fake.url, True), fake.url, "no SGLang server")


def test_answers_come_in_the_order_of_the_prompts_with_so_many_in_flight():
    prompts = [[10 + n] for n in range(9)]

    def generate(body):
        first = body["input_ids"][0]
        time.sleep(0.02 * (20 - first))  # the first prompt is answered last
        return 200, {"output_ids": [first] * 4, "meta_info": facts(1, 1)}

    group, fake = ask(generate, prompts, concurrency=4)
    assert [found.ids for found in group.answers] == [[first] * 4 for first, in prompts]
    assert fake.most == 4 and 0 < group.seconds < 2 and group.draft_seconds == group.verify_seconds == []
    assert all(found.accepted == [0, 1] and found.reached == [1, 2] for found in group.answers)
    path, body = fake.seen[0]  # once, before everything
    assert path.startswith("/flush_cache") and sum(path != "/generate" for path, _ in fake.seen) == 1
    assert fake.seen[1][1]["sampling_params"] == {"temperature": 0.0, "top_p": 1.0, "top_k": -1,
                                                  "max_new_tokens": 4, "stop_token_ids": [2], **NEUTRAL}
    assert ask(generate, prompts, concurrency=1)[1].most == 1


def test_answers_are_cut_by_id():
    plain = {"finish_reason": {"type": "stop"}}
    for ids, kept in ([5, 2, 7], [5, 2]), ([5, 6, 7, 8, 2], [5, 6, 7, 8]), ([5, 3], [5, 3]), ([2], [2]):
        group, _ = ask(lambda body, ids=ids: (200, {"output_ids": ids, "meta_info": plain}), steps=None)
        assert group.answers[0].ids == kept and group.answers[0].accepted == []


def test_faults_of_the_server_are_told():
    refused(lambda: ask((400, {"error": {"message": "too long"}})), "/generate", "status 400", "too long")
    refused(lambda: ask((200, {}), flush=(400, "Flush cache failed.")), "/flush_cache", "Flush cache failed")
    refused(lambda: ask((200, "fine")), "JSON")
    refused(lambda: ask((200, {"text": "a", "meta_info": facts(1)})), "no output_ids")
    abort = {"finish_reason": {"type": "abort", "message": "out of memory"}}
    refused(lambda: ask((200, {"output_ids": [5], "meta_info": abort})), "out of memory")
    refused(lambda: ask((200, {"output_ids": [5] * 4, "meta_info": {"finish_reason": "length"}})),
            "another form")
    for ids in ([5.0] * 4, [5, "6", 7, 8], [[5, 6, 7, 8]], "5678", [-1] * 4, [2**40] * 4, {"5": 6}, 5):
        refused(lambda ids=ids: ask((200, {"output_ids": ids, "meta_info": facts(1, 1)})), "another form")
    refused(lambda: ask((200, {"output_ids": [5] * 4, "meta_info": None})), "another form")
    odd = facts(1, 1, spec_correct_drafts_histogram=["1"])
    refused(lambda: ask((200, {"output_ids": [5] * 4, "meta_info": odd})), "another form")
    refused(lambda: ask((200, {"output_ids": [5, 6], "meta_info": facts(1)})), "after 2 of 4 tokens",
            "--context-length")
    refused(lambda: ask((200, {"output_ids": [5] * 4, "meta_info": {"finish_reason": {"type": "length"}}})),
            "has a drafter", "spec_correct_drafts_histogram")


@pytest.mark.parametrize("histogram, count, accepted, reached", [
    ([2, 1, 0, 1], 9, [0, 0, 1, 3], [1, 1, 2, 3]),  # nothing cut: 1 + 1 + 1 + 2 + 4
    ([2, 1, 0, 1], 8, [0, 0, 1, 3], [1, 1, 2, 3]),  # the target's own token was cut off, no draft was
    ([2, 1, 0, 1], 7, [0, 0, 1, 2], [1, 1, 2, 2]),
    ([2, 1, 0, 1], 6, [0, 0, 1, 1], [1, 1, 2, 1]),
    ([0, 1], 2, [1], [1]),
    ([], 1, [], []),  # prefill's token was all
])
def test_a_cut_verification_counts_what_was_kept(histogram, count, accepted, reached):
    assert count_verifications(facts(*histogram), count, 3, "") == (accepted, reached)
    assert count_verifications(facts(*histogram, num_retractions=2), count + 2, 3, "") == (accepted, reached)


def test_counters_that_contradict_the_answer_are_refused_with_the_numbers():
    for count in (5, 10):
        refused(lambda count=count: count_verifications(facts(2, 1, 0, 1), count, 3, "URL"), "URL",
                [2, 1, 0, 1], f"{count} ids")
    refused(lambda: count_verifications(facts(2, 1, spec_verify_ct=4), 5, 3, ""), "4 verifications")
    refused(lambda: count_verifications(facts(2, 1, spec_num_correct_drafts=2), 5, 3, ""), "2 accepted")
    refused(lambda: count_verifications(facts(0, 0, 0, 0, 1), 6, 3, ""), "3 steps")


def test_commands_are_whole_and_quoted():
    found = serve_commands("my target", "a'b", 5, 1, 6, "bfloat16")
    words = shlex.split(found["sglang"])
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert dict(zip(words[3::2], words[4::2], strict=True)) == {
        "--model-path": "my target", "--dtype": "bfloat16", "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": "a'b", "--speculative-num-steps": "5",
        "--speculative-eagle-topk": "1", "--speculative-num-draft-tokens": "6"}
    words = shlex.split(found["vllm"])
    assert words[:3] == ["vllm", "serve", "my target"]
    assert json.loads(words[-1]) == {"method": "eagle3", "model": "a'b", "num_speculative_tokens": 5}
    assert serve_commands("t", "d", 5, 4, 8, "auto")["vllm"] is None
    trusting = serve_commands("t", "d", 3, 1, 4, "auto", True)
    assert all("--trust-remote-code" in command for command in trusting.values())


STUB = '''
import json, os, signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
print(json.dumps(sys.argv[1:]), flush=True)
if "--die" in sys.argv:
    print("    raise ValueError(x)\\n[2026-01-01 00:00:00] ValueError: no such backend\\nterminated")
    sys.exit(3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
print("pids", os.getpid(), child.pid, flush=True)
asked = []
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        if self.path == "/generate":
            self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(503 if len(asked) < 3 else 200)
        self.end_headers()
        self.wfile.write(b"{}")
    do_POST = do_GET
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """An interpreter whose `sglang.launch_server` is a server that will not end when it is asked to."""
    (tmp_path / "stub" / "sglang").mkdir(parents=True)
    (tmp_path / "stub" / "sglang" / "__init__.py").touch()
    (tmp_path / "stub" / "sglang" / "launch_server.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stub"))
    monkeypatch.setattr("common.sglang.GRACE", 0.5)
    return sys.executable


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, UserError])
def test_a_started_server_is_stopped_with_its_children(stub, tmp_path, end, capfd):
    log = tmp_path / "log"
    try:
        with start_server(stub, "T", "D", 3, 1, 4, "float32", ["--device", "cpu"], log,
                          trust_remote_code=True) as url:
            arguments, pids = log.read_text().splitlines()[:2]
            pids = [int(pid) for pid in pids.split()[1:]]
            assert all(map(alive, pids))
            assert log.read_text().count("GET /health") == 3 and log.read_text().count("POST /generate") == 1
            if end:
                raise end
    except (KeyboardInterrupt, UserError) as error:
        assert type(error) is end
    assert not any(map(alive, pids)) and capfd.readouterr().out == ""
    arguments = json.loads(arguments)
    assert arguments[:2] == ["--device", "cpu"] and "--trust-remote-code" in arguments
    assert arguments[2:6] == ["--host", "127.0.0.1", "--port", arguments[5]]
    assert url.endswith(f":{arguments[5]}")


def test_a_run_that_is_told_to_end_takes_its_server_along(stub, tmp_path):
    log = str(tmp_path / "log")
    code = (f"import time; from common import sglang; sglang.GRACE = 0.5\n"
            f"with sglang.start_server({stub!r}, 'T', None, 0, 0, 0, 'auto', [], {log!r}):\n"
            f"    print('up', flush=True); time.sleep(600)")
    environment = {**os.environ, "PYTHONPATH": os.environ["PYTHONPATH"] + ":."}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                          cwd=Path(__file__).parent.parent, env=environment) as run:
        assert run.stdout.readline() == "up\n"
        run.terminate()
    assert run.returncode == 128 + 15
    arguments, pids = (tmp_path / "log").read_text().splitlines()[:2]
    assert "--speculative" not in arguments and not any(alive(int(pid)) for pid in pids.split()[1:])


def test_a_server_that_does_not_start_is_told_with_its_last_words(stub, tmp_path, monkeypatch):
    def start(python, *extra):
        with start_server(python, "T", "D", 3, 1, 4, "float32", extra, tmp_path / "log"):
            pass

    refused(lambda: start(stub, "--die"), "exit code 3", "served: ValueError: no such backend;",
            tmp_path / "log")
    refused(lambda: start(tmp_path / "nothing"), tmp_path / "nothing", "cannot be run")
    monkeypatch.delenv("PYTHONPATH")
    refused(lambda: start(stub), "No module named", "sglang")


LAST, END = 60, 2  # of the chains below; the end token


def make_pair(folder):
    """A target that writes x + 1 behind x, repeats every tenth token for ever, and ends behind 48; and a
    drafter that proposes what comes two tokens behind the one before the root, at every depth: right at depth
    1, right at all depths in a repetition."""
    path = tiny.make_target(folder / "target")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    target = open_target(path)
    config = {**drafter_config(target, target.vocab_size, default_layers(target.num_layers)),
              "torch_dtype": "float32"}
    drafter = Drafter(config)
    follower = {x: x if x % 10 == 9 else x + 1 for x in range(10, LAST)} | {48: END}
    table = model.model.embed_tokens.weight
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *drafter.named_parameters()]:
            if name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight", "lm_head.weight")):
                weight.zero_()
        drafter.fc.weight[:, : target.hidden_size] = torch.eye(target.hidden_size)
        drafter.norm.weight.fill_(1.0)
        for x in range(10, LAST):
            model.lm_head.weight[follower[x]] += table[x]
            drafter.lm_head.weight[follower.get(follower[x], 0)] += table[x]
    model.save_pretrained(path)
    save_drafter(folder / "drafter", drafter.state_dict(), config, None)
    return path, folder / "drafter", follower


def served(follower, prompt, limit, steps):
    """(ids, accepted) of greedy decoding with make_pair's drafter, by simulation."""
    text = prompt[-1:]
    while len(text) < limit + steps + 2:
        text.append(follower.get(text[-1], 0))
    end = min(text.index(END), limit) if END in text else limit  # of the answer's last id in `text`
    place, accepted = 1, []
    while place < end:
        draft = follower.get(follower.get(text[place - 1], 0), 0)
        right = next((n for n in range(steps) if text[place + 1 + n] != draft), steps)
        accepted.append(min(right, end - place))
        place += right + 1
    return text[1 : end + 1], accepted


def check_answers(url, target, path, follower):
    """All that a server of make_pair's says and does, with the drafter at `path` or none."""
    prompts = [[50, 11, start] for start in (15, 20, 21, 33, 39, 41, 44, 56)]
    steps = 3 if path else None
    settings = server_settings(url, path is not None)
    assert settings["model"] == str(target) and settings["dtype"] == "float32"
    assert settings["drafter"] == (path and str(path)) and settings["steps"] == steps
    assert settings["max_running_requests"] == 4
    refused(lambda: server_settings(url, path is None), url)
    refused(lambda: answer(url, prompts, 4000, {END}, 1, GREEDY), "/generate", "status 400", "4000")
    for limit in (1, 2, 9, 10, 11, 24):
        for concurrency in (1, 4):
            found = answer(url, prompts, limit, {END}, concurrency, GREEDY, steps)
            for prompt, one in zip(prompts, found.answers, strict=True):
                ids, accepted = served(follower, prompt, limit, 3)
                assert one.ids == ids
                assert sum(one.accepted) == (sum(accepted) if path else 0)
                assert len(one.accepted) == (len(accepted) if path else 0)
    longest = [50] * (settings["room"] - 30)
    assert len(answer(url, [longest], 30, set(), 1, GREEDY, steps).answers[0].ids) == 30
    refused(lambda: answer(url, [longest], 31, set(), 1, GREEDY, steps), url)


@pytest.mark.skipif("SGLANG_PYTHON" not in os.environ,
                    reason="SGLANG_PYTHON does not name the Python of an environment with SGLang")
def test_sglang_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "sgl_shim"))
    for name, value in {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    target, drafter, follower = make_pair(tmp_path)
    python = os.environ["SGLANG_PYTHON"]
    # a default of the server that would repeat what it said: our requests state that they want none
    extra = [*CPU, "--preferred-sampling-params", json.dumps({"repetition_penalty": 0.01})]
    for path in (None, drafter):
        log = tmp_path / f"log-{bool(path)}"
        with start_server(python, target, path, 3, 1, 4, "float32", extra, log) as url:
            check_answers(url, target, path, follower)
