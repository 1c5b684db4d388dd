"""SGLang over HTTP, and SGLang as the source of hidden states.

First the servers that are measured: started, asked what they are, asked for answers, stopped. Then the class
SGLang, which takes answers and the target's hidden states from an engine that runs our hook, a server's or
one in this process. Only that class imports SGLang itself, and only for an engine in this process.
"""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file

from common.capture_hook import PREFIX
from common.cli import Failed, UserError, say
from common.decode import Answer, Group, cut
from common.drafter import layer_ids
from common.target import process_logits

TESTED = "0.5.23"  # SGLang's version
OPENER = build_opener(ProxyHandler({}))  # a server that is measured is never behind the environment's proxy
LONGEST_ANSWER = 3600  # seconds until an answer is given up
GRACE = 20  # seconds that a server has to stop by itself
TIME = re.compile(r"^\[[^\]]*\]\s*")  # before a line of its log
ERROR = re.compile(r"^[\w.]*(Error|Exception)\b|\berror: |No module named")
STATED = {  # the kinds of what is read of a server's description of itself
    "context_length": int, "max_req_input_len": int, "chunked_prefill_size": int,
    "speculative_num_draft_tokens": int, "model_path": str, "dtype": str, "speculative_algorithm": str,
    "speculative_draft_model_path": str, "forward_hooks": list, "cuda_graph_config": dict,
    "cuda_graph_config.prefill": dict,
}
NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
           "min_new_tokens": 0}  # of a request: nothing of it is wanted
GREEDY = {"temperature": 0, "top_p": 1.0, "top_k": 0}
KINDS = {int: "an integer", str: "a string", list: "an array", dict: "an object"}

ROOT = Path(__file__).resolve().parent.parent
HOOK = "common.capture_hook:write_states"
FILE_DTYPES = {"F32": "float32", "F16": "float16"}
IN_FLIGHT, MOST_IN_FLIGHT = 128, 1024  # requests: more than an engine runs at once, each has a thread here
READERS, AHEAD = 8, 2  # files of states that are read at once; batches under way while one is taken
# Settings that share the rows of a forward pass among processes: rank 0 has not all of them, or none.
SHARING = {
    "enable_dp_attention": "--enable-dp-attention", "attn_dp_size": "--attention-data-parallel-size",
    "attn_cp_size": "--attention-context-parallel-size", "enable_prefill_cp": "--enable-prefill-cp",
    "pp_size": "--pipeline-parallel-size", "dwdp_size": "--dwdp-size",
    "enable_layernorm_sp": "--enable-layernorm-sp",
    "enable_attn_tp_input_scattered": "--enable-attn-tp-input-scattered",
}
PATIENCE = 60  # seconds that a file may come after its reply: a network's file system shows it late
# a sample of all the target's positions, and the one token that must be asked for
LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


def serving_arguments(target, drafter, steps, topk, draft_tokens, dtype, trust_remote_code=False):
    """Arguments of sglang.launch_server, every speculative number written: SGLang picks others where one is
    left out. drafter: its folder, or None for plain decoding."""
    arguments = ["--model-path", str(target), "--dtype", dtype]
    if trust_remote_code:
        arguments.append("--trust-remote-code")
    if drafter:
        arguments += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(drafter),
                      "--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk),
                      "--speculative-num-draft-tokens", str(draft_tokens)]
    return arguments


def serve_commands(target, drafter, steps, topk, draft_tokens, dtype, trust_remote_code=False):
    """{"sglang", "vllm"}: the shell command that serves this drafter; vLLM's is None for a tree, since vLLM
    drafts chains only."""
    arguments = serving_arguments(target, drafter, steps, topk, draft_tokens, dtype, trust_remote_code)
    sglang = shlex.join(["python", "-m", "sglang.launch_server", *arguments])
    if topk > 1:
        return {"sglang": sglang, "vllm": None}
    vllm = ["vllm", "serve", str(target), "--dtype", dtype]
    if trust_remote_code:
        vllm.append("--trust-remote-code")
    settings = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": steps}
    return {"sglang": sglang, "vllm": shlex.join([*vllm, "--speculative-config", json.dumps(settings)])}


@contextmanager
def start_server(python, target, drafter, steps, topk, draft_tokens, dtype, extra, log,
                 trust_remote_code=False):
    """The URL of a server that answers, started with the interpreter `python` and stopped for good when the
    block is left.

    drafter: folder, or None for plain decoding. extra: more arguments of sglang.launch_server, a list; ours
    win. log: file that gets all that the server prints. Raises UserError when it cannot be started, ends, or
    does not answer within an hour.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [str(python), "-m", "sglang.launch_server", *extra, "--host", "127.0.0.1", "--port", str(port),
               *serving_arguments(target, drafter, steps, topk, draft_tokens, dtype, trust_remote_code)]
    # a run that is told to end must not leave its server behind on the accelerator
    deadly = [number for number in (signal.SIGTERM, signal.SIGHUP)
              if signal.getsignal(number) is signal.SIG_DFL]
    for number in deadly:
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    process = None
    try:
        with open(log, "wb") as output:
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output,
                                           stderr=subprocess.STDOUT, start_new_session=True)
            except OSError as error:
                raise UserError(f"{python} cannot be run ({error.strerror}); give the Python of an "
                                f"environment that holds SGLang") from None
        drafting = f"drafter {drafter}" if drafter else "no drafter"
        say(f"starting SGLang with {drafting}; its output is in {log}")
        wait_for_server(process, url, log)
        yield url
    finally:
        if process:
            _stop(process)
        for number in deadly:
            signal.signal(number, signal.SIG_DFL)


def wait_for_server(process, url, log, patience=3600):
    """Until the server is healthy and has answered a request of one token. Raises UserError where it ends, or
    is not healthy in `patience` seconds."""
    deadline = time.monotonic() + patience
    healthy = False
    while not healthy:
        if process.poll() is not None:
            raise UserError(f"SGLang ended (exit code {process.returncode}) before it served: "
                            f"{_last_words(log)}; all of it is in {log}; --sglang-python names its "
                            f"environment, see also --server-arguments")
        if time.monotonic() > deadline:
            raise UserError(f"SGLang does not serve after {patience} s; see {log}")
        time.sleep(0.5)
        with suppress(UserError):  # not up yet
            healthy = _ask(url, "/health")[0] == 200
    try:
        generate(url, {"input_ids": [1], "sampling_params": _sampling_params(GREEDY, 1, ())})
    except UserError as error:
        raise UserError(f"{error}; {_last_words(log)}; all that SGLang printed is in {log}") from None


def _last_words(log):
    """The last three different lines of a server's log that name an error, else its last line."""
    lines = []
    for line in Path(log).read_text(errors="replace").splitlines():
        line = TIME.sub("", line.strip())[:300]
        if line:
            lines.append(line)
    telling = [line for line in lines if ERROR.search(line)]
    return " | ".join(dict.fromkeys(telling[-3:] or lines[-1:])) or "it printed nothing"


def _stop(process):
    """End the server and all its children: asked first, then killed; wait until they are gone and their
    memory is free."""
    try:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    finally:  # also when Ctrl-C is pressed again
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with suppress(ProcessLookupError):
        for _ in range(50):
            os.killpg(process.pid, 0)
            time.sleep(0.1)


def server_settings(url, drafter_expected):
    """What the server at `url` runs: a dict of version, model, dtype, device, algorithm, steps, topk,
    draft_tokens, drafter, tp_size, max_running_requests, context_length, and room: how many tokens a prompt
    and its answer may have together.

    Raises UserError where nothing or something else answers, and where a drafter is missing, is not run as
    EAGLE-3, or is not expected.
    """
    info = server_info(url)
    check_kinds(info, url)
    algorithm, drafter = info["speculative_algorithm"], info.get("speculative_draft_model_path")
    wanted = "start it with --speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFTER"
    if drafter_expected and algorithm is None:
        raise UserError(f"{url} serves without a drafter; {wanted}")
    if drafter_expected and algorithm.upper() != "EAGLE3":
        raise UserError(f"{url} runs --speculative-algorithm {algorithm}, with which an EAGLE-3 drafter is "
                        f"never accepted; {wanted}")
    if drafter_expected and not drafter:
        raise UserError(f"{url} runs EAGLE3 without a drafter; {wanted}")
    if not drafter_expected and algorithm is not None:
        raise UserError(f"{url} is to decode plainly, and runs --speculative-algorithm {algorithm}; start it "
                        f"without the --speculative arguments")
    context, draft_tokens = context_length(info), info.get("speculative_num_draft_tokens")
    # SGLang asks for room for a last verification, else keeps two positions
    room = context and context - max(draft_tokens or 0, 2)
    return {"version": info.get("version"), "model": info.get("model_path"), "dtype": info.get("dtype"),
            "device": info.get("device"), "algorithm": algorithm, "steps": info.get("speculative_num_steps"),
            "topk": info.get("speculative_eagle_topk"), "draft_tokens": draft_tokens, "drafter": drafter,
            "tp_size": info.get("tp_size"), "max_running_requests": info.get("max_running_requests"),
            "context_length": context, "room": room}


def server_info(url):
    """All that the server at `url` says of itself. Raises UserError where nothing or something else
    answers."""
    status, text = _ask(url, "/server_info")
    if status == 404:  # before SGLang 0.5.3
        status, text = _ask(url, "/get_server_info")
    info = _parse(text)
    if status != 200 or not isinstance(info, dict) or "speculative_algorithm" not in info:
        raise UserError(f"{url} is no SGLang server (status {status}, {text[:80]!r}); give the address that "
                        f"sglang.launch_server prints")
    return info


def check_kinds(info, where):
    """Refuse an SGLang's `info` that states something of another kind than is read of it here."""
    for name, kind in STATED.items():
        value = info
        for key in name.split("."):
            value = (value or {}).get(key)
        if value is not None and not isinstance(value, kind):
            raise UserError(f"{where} says of itself {name} {json.dumps(value, default=str)[:80]}, "
                            f"{KINDS[kind]} or null is wanted; use SGLang {TESTED}")


def context_length(info):
    """Tokens of a prompt and its answer together, None where SGLang's `info` states none."""
    limits = []
    if info.get("context_length"):
        limits.append(info["context_length"])
    if info.get("max_req_input_len"):  # tells of a small KV pool
        limits.append(info["max_req_input_len"] + 6)
    return min(limits, default=None)


def answer(url, prompts, limit, eos_ids, concurrency, sampling, steps=None):
    """Answers of a server to prompts (lists of ids), `concurrency` requests in flight, as a Group in the
    order of the prompts.

    limit: most tokens of an answer. sampling: {temperature, top_p, top_k (0: off)}. steps: of the server's
    drafter, None for a server without one. The prefix cache is emptied first, outside the time, so that no
    group profits from the one before. Raises UserError for whatever the server refuses, and for counters that
    are missing or contradict the answer.
    """
    params = _sampling_params(sampling, limit, eos_ids)
    bodies = [{"input_ids": ids, "sampling_params": params} for ids in prompts]
    _require(url, "/flush_cache?timeout=60", {})  # waits until what was cancelled before has ended
    start = time.perf_counter()
    replies = _generate_all(url, bodies, concurrency, lambda reply, n: reply)
    seconds = time.perf_counter() - start
    return Group([read_answer(reply, url, limit, eos_ids, steps) for reply in replies], seconds, [], [])


def _sampling_params(sampling, limit, eos_ids):
    """A request's, with what is not asked for stated, too: a server may have defaults of its own."""
    return {**NEUTRAL, "temperature": sampling["temperature"], "top_p": sampling["top_p"],
            "top_k": sampling["top_k"] or -1, "max_new_tokens": limit, "stop_token_ids": sorted(eos_ids)}


def read_answer(reply, url, limit, eos_ids, steps=None):
    """The Answer in one reply of SGLang to a request."""
    try:
        ids, facts = reply.get("output_ids"), reply.get("meta_info", {})
        reason = facts.get("finish_reason") or {}
        ended = reason.get("type")
        if not ids or ended not in ("stop", "length"):
            sent = "ids" if ids else "no output_ids"
            raise UserError(f"{url}/generate sent {sent} and finish_reason {json.dumps(reason)}; see the "
                            f"server's log")
        strange = [token for token in ids if type(token) is not int or not 0 <= token < 2**31]
        if strange:
            raise TypeError(f"output_ids hold {strange[0]!r}")
        ids = cut(ids, limit, eos_ids)
        if ended == "length" and len(ids) < limit and ids[-1] not in eos_ids:
            raise UserError(f"{url} cut an answer after {len(ids)} of {limit} tokens; start it with a larger "
                            f"--context-length, or ask for less")
        accepted, reached = count_verifications(facts, len(ids), steps, url) if steps else ([], [])
    except (TypeError, AttributeError) as error:
        raise UserError(f"{url}/generate sent a reply of another form ({error}); use SGLang {TESTED} or "
                        f"later") from None
    return Answer(ids=ids, accepted=accepted, reached=reached, candidates=[])


def count_verifications(facts, count, steps, url):
    """(accepted, reached), one int a verification, of an answer of `count` ids, out of SGLang's counters in
    `facts`.

    The histogram has no order, so neither have the lists. SGLang counts a verification whole that the end
    token or the limit cut, the project counts what was kept: count = 1 + sum(accepted + 1) - overshoot, one
    more for each time that the server took the request back and read it again. Of the cut one all that is
    left is accepted, and no depth behind it was judged. The counters do not say which it was: the one that
    accepted most is taken, totals are right with any.
    """
    histogram = facts.get("spec_correct_drafts_histogram")
    if histogram is None and count > 1:
        raise UserError(f"{url} has a drafter and sends no spec_correct_drafts_histogram with its answers; "
                        f"use SGLang {TESTED} or later, with its Python front end (SGLANG_RUST_SERVER unset)")
    accepted = [drafts for drafts, times in enumerate(histogram or []) for _ in range(times)]
    verifications, correct = facts.get("spec_verify_ct", 0), facts.get("spec_num_correct_drafts", 0)
    again = facts.get("num_retractions", 0)
    overshoot = 1 + again + sum(accepted) + len(accepted) - count
    most = max(accepted, default=0)
    agree = len(accepted) == verifications and sum(accepted) == correct
    if not agree or most > steps or not 0 <= overshoot <= most:
        raise UserError(f"{url} sent counters that contradict each other: histogram {histogram}, "
                        f"{verifications} verifications, {correct} accepted, {again} retractions, {count} "
                        f"ids, {steps} steps; its figures cannot be used")
    reached = [min(drafts + 1, steps) for drafts in accepted]
    if overshoot:
        accepted[-1] = reached[-1] = most + 1 - overshoot
    return accepted, reached


def generate(url, body):
    """What /generate answers to one request: {output_ids, meta_info, ...}."""
    value = _parse(_require(url, "/generate", body, LONGEST_ANSWER))
    if not isinstance(value, dict):
        raise UserError(f"{url}/generate did not answer with a JSON object; is it an SGLang server?")
    return value


def _generate_all(url, bodies, concurrency, read):
    """[read(reply, n)] of requests, so many in flight. Where one fails, those that wait are not sent."""
    pool = ThreadPoolExecutor(concurrency)
    try:
        return list(pool.map(lambda n: read(generate(url, bodies[n]), n), range(len(bodies))))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _require(url, path, body, timeout=90):
    status, text = _ask(url, path, body, timeout)
    if status != 200:
        words = " ".join(text.split())[:400] or "nothing"
        raise UserError(f"{url}{path} answered with status {status}: {words}")
    return text


def _ask(url, path, body=None, timeout=90):
    """(status, text) of a GET, or a POST of `body` as JSON. Raises UserError when nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    try:
        request = Request(url.rstrip("/") + path, data, {"Content-Type": "application/json"})
        with OPENER.open(request, timeout=timeout) as reply:
            return reply.status, reply.read().decode(errors="replace")
    except HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(f"{url}{path} does not answer ({reason}); give the address of a running server, as "
                        f"http://HOST:PORT") from None


def _parse(text):
    with suppress(ValueError, RecursionError):
        return json.loads(text)


def server_command(target, layers, dtype, max_length, folder, arguments=(), trust_remote_code=False):
    """The shell command that starts a stock SGLang server whose states SGLang(..., url=...) reads.

    folder: where the states pass, seen by both machines. arguments: more arguments of sglang.launch_server, a
    list; ours win.
    """
    command = ["python", "-m", "sglang.launch_server", *arguments]
    command += _engine_arguments(target, layers, _dtype(target, dtype), max_length, folder, trust_remote_code)
    return f"PYTHONPATH={shlex.quote(str(ROOT))} {LONGER}=1 {shlex.join(command)}"


def _engine_arguments(target, layers, dtype, max_length, folder, trust_remote_code):
    """What SGLang must be started with. Each of these has a trap behind it that `_fault` names."""
    hook = {"name": "states", "target_modules": ["logits_processor", "*.logits_processor"],
            "hook_factory": HOOK, "config": {"folder": str(folder)}}
    arguments = ["--model-path", str(target.folder), "--dtype", dtype,
                 "--context-length", str(max_length + 8), "--enable-return-aux-hidden-states",
                 "--speculative-algorithm", "EAGLE3"]  # the name of a convention, no drafter
    ids = _engine_layers(target, layers)
    if ids:
        arguments += ["--return-aux-hidden-state-layer-ids", *map(str, ids)]
    arguments += ["--disable-radix-cache", "--chunked-prefill-size", "-1", "--disable-prefill-cuda-graph",
                  "--forward-hooks", json.dumps([hook])]
    if trust_remote_code:
        arguments.append("--trust-remote-code")
    return arguments


def _engine_layers(target, layers):
    """What SGLang calls `layers`; None for those that it takes by itself."""
    config = layer_ids(layers, target.num_layers, target.model_class)
    return config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")


def _dtype(target, dtype):
    """That of the target's files for auto: SGLang's own auto makes float16 of float32."""
    if dtype != "auto":
        return dtype
    if not target.weights:  # a plan
        return str(target.text.get("dtype") or "bfloat16")
    with safe_open(target.weights[target.lm_head_name], framework="pt") as file:
        return FILE_DTYPES.get(file.get_slice(target.lm_head_name).get_dtype(), "bfloat16")


class SGLang:
    """The target run by SGLang; a context manager. Made in the main thread, its methods may be called from
    any one thread at a time.

    target: Target. layers: three HF indices. dtype: "auto", "bfloat16", "float16" or "float32". max_length:
    most tokens of a sample. url: of a running server, None to start an engine in this process. folder: where
    the states' files pass; None: with a server the one it was started with, else one of our own. arguments:
    more arguments of sglang.launch_server for our engine, a list.

    `dtype` is the states' torch.dtype; `device`, where they are returned: a GPU that has room for the
    lm_head, else the CPU. Raises UserError for whatever is wrong with the engine, on a probe before the first
    sample.
    """

    def __init__(self, target, layers, dtype, max_length, url=None, folder=None, arguments=(),
                 trust_remote_code=False):
        self.target, self.layers, self.url = target, layers, url
        self.where = url or "the engine"
        self.name, self.count = f"{PREFIX}{uuid.uuid4().hex[:12]}", 0  # of our requests
        dtype = _dtype(target, dtype)
        self.dtype = getattr(torch, dtype)
        self.engine = self.folder = self.own_folder = None
        self.readers = threading.Semaphore(READERS)
        try:
            if url:
                info = server_info(url)
            else:
                folder = folder or self._make_folder()
                ours = _engine_arguments(target, layers, dtype, max_length, folder, trust_remote_code)
                info = self._start([*arguments, *ours])
            hook_folder = self._check_settings(info, max_length)
            running = info.get("max_running_requests")
            self.width = min(max(running if type(running) is int else 0, IN_FLIGHT), MOST_IN_FLIGHT)
            if self.engine:  # its requests are taken on all the time, by one thread
                threading.Thread(target=self.engine.loop.run_forever, daemon=True).start()
            self.folder = Path(folder or hook_folder)
            if not self.folder.is_dir():
                raise UserError(f"{self.where} writes states to {self.folder}, which is no folder here; "
                                f"start it with a folder that both machines see, or name its place here with "
                                f"--states-folder")
            weight = target.lm_head()
            self.device = _device(weight.nbytes)
            self.weight, self.bias = weight.to(self.device, self.dtype), None
            bias = target.lm_head_name.removesuffix("weight") + "bias"
            if bias in target.weights:
                self.bias = target.tensor(bias).to(self.device, self.dtype)
            self._probe(min(max_length, 256))
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        if self.engine:
            self.engine.loop.call_soon_threadsafe(self.engine.loop.stop)
            self.engine.shutdown()
            self.engine = None
        if self.own_folder:
            shutil.rmtree(self.own_folder, ignore_errors=True)
        elif self.folder:  # what an interruption left of ours
            for stray in self.folder.glob(f"{self.name}-*"):
                stray.unlink(missing_ok=True)

    def _make_folder(self):
        """In memory, where there is enough of it: a container's /dev/shm may hold 64 MiB."""
        memory = Path("/dev/shm")
        roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30
        self.own_folder = tempfile.mkdtemp(prefix="hidden-states-", dir=memory if roomy else None)
        return self.own_folder

    def _start(self, arguments):
        """Start our engine; returns what it says of itself."""
        os.environ[LONGER] = "1"
        try:
            import sglang
            from sglang.srt.server_args import prepare_server_args
        except ImportError as error:
            raise UserError(f"SGLang cannot be imported here ({error}); install requirements-sglang.txt in "
                            f"an environment of its own, use a server with --server-url, or --backend "
                            f"hf") from None
        try:
            settings = prepare_server_args(["--log-level", "error", *arguments])
        except (SystemExit, ValueError) as error:
            raise UserError(f"SGLang {sglang.__version__} does not take its arguments ({error}); see above "
                            f"and --server-arguments, or use --backend hf") from None
        # SGLang's own would kill this process without a word
        settings.custom_sigquit_handler = _engine_failed
        try:
            self.engine = sglang.Engine(server_args=settings)
        except RuntimeError as error:
            raise Failed(f"SGLang did not start ({str(error)[:200]}); what it said is above") from None
        return self.engine.get_server_info()

    def _check_settings(self, info, max_length):
        """Refuse an engine that was started otherwise than it must be. Returns the folder that its hook
        writes to."""
        check_kinds(info, self.where)
        folders = [hook["config"]["folder"] for hook in info.get("forward_hooks") or () if _is_ours(hook)]
        fault = self._fault(info, max_length, folders)
        if fault:
            what, remedy = fault
            raise UserError(f"{self.where} {what}; start it with {remedy} (--dry-run prints the whole "
                            f"command)")
        if info.get("version") != TESTED:
            say(f"warning: {self.where} is SGLang {info.get('version')}, tried was {TESTED}; the states of a "
                f"probe are checked")
        self.heeds_seeds = info.get("enable_deterministic_inference")
        return folders[0]

    def _fault(self, info, max_length, folders):
        """(what is wrong with an engine, with what else to start it), None for a right one."""
        algorithm = info["speculative_algorithm"]
        if algorithm or info.get("speculative_draft_model_path"):
            return f"runs a drafter (--speculative-algorithm {algorithm})", "the target alone"
        if info.get("aux_hidden_state_capture") != "eagle3":
            return ("does not capture the three layers",
                    "--enable-return-aux-hidden-states --speculative-algorithm EAGLE3, and no drafter")
        wanted = _engine_layers(self.target, self.layers)
        given = info.get("return_aux_hidden_state_layer_ids")
        if given != wanted:
            flag = "--return-aux-hidden-state-layer-ids"
            remedy = f"{flag} {' '.join(map(str, wanted))}" if wanted else f"no {flag}"
            return f"captures SGLang's layers {given or 'by default'}", remedy
        if not folders:
            return ("has no hook of ours",
                    f"--forward-hooks as --dry-run prints it, and PYTHONPATH={ROOT} or its place there")
        if not info.get("disable_radix_cache"):
            return "has a prefix cache, behind which rows are missing", "--disable-radix-cache"
        chunk = info.get("chunked_prefill_size") or -1
        if chunk > 0:
            return (f"cuts prompts at {chunk} tokens, and only a last piece's rows would come",
                    "--chunked-prefill-size -1")
        graph = ((info.get("cuda_graph_config") or {}).get("prefill") or {}).get("backend", "disabled")
        if graph != "disabled":
            return (f"replays prompts as CUDA graphs ({graph}), in which no hook runs",
                    "--disable-prefill-cuda-graph")
        for name, flag in SHARING.items():
            value = info.get(name)
            if value is True or type(value) is int and value > 1:
                return (f"runs with {flag} ({name} is {value}), where rank 0 has only a part of the rows",
                        f"tensor parallelism only (--tp), no {flag}")
        context = context_length(info)
        if context and context - 3 < max_length:
            room = context - 3
            return (f"takes samples of at most {room} tokens, and these have up to {max_length}",
                    f"--context-length {max_length + 8} and memory for that many, or give --max-length "
                    f"{room}")
        return None

    def _probe(self, length):
        """Two equal prompts, one after the other: a prefix cache would show, and the next token tells whose
        last states these are."""
        target = self.target
        ids = [n % target.vocab_size for n in range(length)]
        for _ in range(2):
            rid = self._name()
            reply = self._request(_state_request(ids, rid))
            _, last = self._read(rid, length)
            [token] = read_answer(reply, self.where, 1, ()).ids
            logits = self.lm_head(last[-1:]).float()
            logits = process_logits(logits, target.logit_softcap, target.logit_scale)[0]  # [V]
            gap = torch.inf
            if token < len(logits):
                gap = (logits.max() - logits[token]) / logits.abs().max()
            if not gap <= 0.02:  # of bfloat16 two tokens may be as good; NaN is no small gap
                raise UserError(f"{self.where} goes on with token {token}, and the lm_head of "
                                f"{target.folder} on its last state with {int(logits.argmax())}; is it "
                                f"another target? start it with --model-path {target.folder}")

    def answer(self, prompts, limits, sampling, seeds, report=lambda ids: None):
        """The target's answers: a list of id lists, in the order of the prompts, cut as common.decode.cut
        does (stop id kept).

        prompts: id lists. limits: most new tokens of each. sampling: dict of temperature, top_p, top_k (0:
        off), stop_ids. seeds: an int a prompt. report(ids) is called with each answer as it ends, in any
        order, perhaps in another thread.
        """
        if sampling["temperature"] and not self.heeds_seeds:
            say(f"note: {self.where} draws answers without regard to --seed; it heeds it only with "
                f"--enable-deterministic-inference")
            self.heeds_seeds = True  # told of once
        stops = set(sampling["stop_ids"])
        bodies = []
        for prompt, limit, seed in zip(prompts, limits, seeds, strict=True):
            params = {**_sampling_params(sampling, limit, stops), "sampling_seed": seed}
            bodies.append({"input_ids": prompt, "sampling_params": params})

        def read(reply, n):
            ids = read_answer(reply, self.where, limits[n], stops).ids
            report(ids)
            return ids

        return self._send(bodies, read)

    def states(self, samples):
        """[(aux [T, 3H], last [T, H])], in the order of `samples`, id lists; on self.device, in self.dtype.
        All of their states are in memory: give some 32,768 tokens at a time."""
        return next(self.flow([samples]))

    def flow(self, batches):
        """The `states` of one batch of samples after the other. Requests of AHEAD further batches are under
        way meanwhile, so that the engine never waits for what is done with one; files are read as replies
        come."""
        pool, sent = ThreadPoolExecutor(self.width), deque()
        try:
            for samples in batches:
                sent.append([pool.submit(self._forward, ids, self._name()) for ids in samples])
                if len(sent) > AHEAD:
                    yield [future.result() for future in sent.popleft()]
            while sent:
                yield [future.result() for future in sent.popleft()]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def lm_head(self, hidden):
        """[n, V]: the target's lm_head on hidden [n, H]."""
        return F.linear(hidden, self.weight, self.bias)

    def _name(self):
        self.count += 1
        return f"{self.name}-{self.count}"

    def _forward(self, ids, rid):
        """(aux, last) of a prompt that is answered with one token: what SGLang asks for at least."""
        self._request(_state_request(ids, rid))
        with self.readers:
            return self._read(rid, len(ids))

    def _send(self, bodies, read):
        """[read(reply, n)] of requests, `width` of them under way. Where one fails, those that wait are not
        sent."""
        pool = ThreadPoolExecutor(self.width)
        try:
            return list(pool.map(lambda n: read(self._request(bodies[n]), n), range(len(bodies))))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _request(self, body):
        """The reply to one request; from any thread."""
        if self.url:
            return generate(self.url, body)
        try:
            return asyncio.run_coroutine_threadsafe(self.engine.async_generate(**body),
                                                    self.engine.loop).result()
        except ValueError as error:
            raise UserError(f"SGLang refuses a request ({str(error)[:300]})") from None

    def _read(self, rid, count):
        """(aux [T, 3H], last [T, H]) of a request of `count` tokens, off the folder."""
        path, failed = self.folder / f"{rid}.safetensors", self.folder / f"{rid}.error"
        deadline = time.monotonic() + PATIENCE
        while not path.exists():
            if failed.exists():
                raise UserError(f"{self.where} cannot write states to {self.folder} ({failed.read_text()}); "
                                f"make room or give --states-folder")
            if time.monotonic() > deadline:
                raise UserError(f"{self.where} answered, and no states came to {self.folder} in {PATIENCE} "
                                f"s: its hook did not run or writes elsewhere (see its log); start it as "
                                f"--dry-run prints it, with a folder that both machines see")
            time.sleep(0.002)
        try:
            tensors = load_file(path, str(self.device))
        finally:
            path.unlink()
        last = tensors.pop("last")
        aux = torch.cat([tensors[name] for name in sorted(tensors)], 1)  # [T, 3H]
        self._check_states(aux, last, count)
        return aux, last

    def _check_states(self, aux, last, count):
        rows, hidden = last.shape
        if rows != count or len(aux) != rows:
            raise UserError(f"{self.where} sent {rows} rows of states for {count} tokens; start it with "
                            f"--disable-radix-cache --chunked-prefill-size -1")
        target = self.target
        if hidden != target.hidden_size or aux.shape[1] != 3 * hidden:
            raise UserError(f"{self.where} sent states of {hidden} and {aux.shape[1]}, {target.folder} has "
                            f"{target.hidden_size} and three layers of it; start it with --model-path "
                            f"{target.folder}")
        if last.dtype != self.dtype:
            theirs, ours = (str(dtype).removeprefix("torch.") for dtype in (last.dtype, self.dtype))
            raise UserError(f"{self.where} runs in {theirs}, wanted is {ours}; start it with --dtype {ours}, "
                            f"or give --dtype {theirs}")


def _state_request(ids, rid):
    return {"input_ids": ids, "rid": rid, "sampling_params": _sampling_params(GREEDY, 1, ())}


def _is_ours(hook):
    """Whether a forward hook of an engine is the one that writes states."""
    match hook:
        case {"hook_factory": factory, "config": {"folder": str()}}:
            return factory == HOOK
    return False


def _engine_failed(*_):
    raise Failed("SGLang did not start; what it said is above")


def _device(weight_bytes):
    """A GPU with room for the lm_head and what is done with it, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > 2 * weight_bytes + (2 << 30):
        return torch.device("cuda")
    return torch.device("cpu")
