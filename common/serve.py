"""SGLang servers, over HTTP: start and stop one, see what it runs, have it answer prompts and read its counters.

SGLang itself is never imported: it lives in an environment, or on a machine, of its own.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from common.cli import UserError, say
from common.decode import Answer, Group, cut

OPENER = build_opener(ProxyHandler({}))  # a server that is measured is never behind the proxy of the environment
LONGEST_ANSWER = 3600  # seconds until an answer is given up
GRACE = 20  # seconds that a server has to stop by itself
STATED = [("an integer", int, ["context_length", "max_req_input_len", "chunked_prefill_size", "speculative_num_draft_tokens"]),
          ("a string", str, ["model_path", "dtype", "speculative_algorithm", "speculative_draft_model_path"]),
          ("an array", list, ["forward_hooks"]), ("an object", dict, ["cuda_graph_config", "cuda_graph_config.prefill"])]


def serving_arguments(target, drafter, steps, topk, draft_tokens, dtype, trust_remote_code=False):
    """Arguments of sglang.launch_server, every speculative number written: SGLang picks others where one is left out."""
    arguments = ["--model-path", str(target), "--dtype", dtype]
    if trust_remote_code:
        arguments.append("--trust-remote-code")
    if drafter:
        arguments += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(drafter),
                      "--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk),
                      "--speculative-num-draft-tokens", str(draft_tokens)]
    return arguments


def serve_commands(target, drafter, steps, topk, draft_tokens, dtype, trust_remote_code=False):
    """{"sglang", "vllm"}: the shell command that serves this drafter; vLLM's is None for a tree, it drafts chains only."""
    sglang = ["python", "-m", "sglang.launch_server",
              *serving_arguments(target, drafter, steps, topk, draft_tokens, dtype, trust_remote_code)]
    settings = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": steps}
    vllm = ["vllm", "serve", str(target), "--dtype", dtype, *["--trust-remote-code"] * trust_remote_code,
            "--speculative-config", json.dumps(settings)]
    return {"sglang": shlex.join(sglang), "vllm": shlex.join(vllm) if topk == 1 else None}


@contextmanager
def start_server(python, target, drafter, steps, topk, draft_tokens, dtype, extra, log, trust_remote_code=False, patience=3600):
    """The URL of a server that answers, started with the interpreter `python` and stopped for good when the block is left.

    drafter: folder, or None for plain decoding. extra: more arguments of sglang.launch_server, a list; ours win. log: file that
    gets all that the server prints. Raises UserError when it cannot be started, ends, or does not answer within `patience` seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [str(python), "-m", "sglang.launch_server", *extra, "--host", "127.0.0.1", "--port", str(port),
               *serving_arguments(target, drafter, steps, topk, draft_tokens, dtype, trust_remote_code)]
    # a run that is told to end must not leave its server behind on the accelerator
    deadly = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in deadly:
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    process = None
    try:
        with open(log, "wb") as output:
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                           start_new_session=True)
            except OSError as error:
                raise UserError(f"{python} cannot be run ({error.strerror}); give the Python of an environment that holds SGLang") from None
        say(f"starting SGLang with {f'drafter {drafter}' if drafter else 'no drafter'}; its output is in {log}")
        _wait(process, url, log, patience)
        yield url
    finally:
        if process:
            _stop(process)
        for number in deadly:
            signal.signal(number, signal.SIG_DFL)


def _wait(process, url, log, patience):
    """Until the server is healthy and has answered a request of one token."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UserError(f"SGLang ended (exit code {process.returncode}) before it served: {_last_words(log)}; all of it is in {log}; "
                            f"--sglang-python names its environment, see also --server-arguments")
        with suppress(UserError):  # not up yet
            if _ask(url, "/health")[0] == 200:
                break
        time.sleep(0.5)
    else:
        raise UserError(f"SGLang does not serve after {patience} s; see {log}")
    try:
        generate(url, {"input_ids": [1], "sampling_params": {"temperature": 0, "max_new_tokens": 1}})
    except UserError as error:
        raise UserError(f"{error}; {_last_words(log)}; all that SGLang printed is in {log}") from None


def _last_words(log):
    """The last three different lines of a server's log that name an error, else its last line."""
    lines = [re.sub(r"^\[[^\]]*\]\s*", "", line.strip())[:300] for line in Path(log).read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    telling = [line for line in lines if re.search(r"^[\w.]*(Error|Exception)\b|\berror: |No module named", line)]
    return " | ".join(dict.fromkeys(telling[-3:] or lines[-1:])) or "it printed nothing"


def _stop(process):
    """End the server and all its children: asked first, then killed; wait until they are gone and their memory is free."""
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
    """What the server at `url` runs: a dict of version, model, dtype, device, algorithm, steps, topk, draft_tokens, drafter,
    tp_size, max_running_requests, context_length, and room: how many tokens a prompt and its answer may have together.

    Raises UserError where nothing or something else answers, and where a drafter is missing, is not run as EAGLE-3, or is not
    expected.
    """
    info = server_info(url)
    check_kinds(info, url)
    algorithm, drafter = info["speculative_algorithm"], info.get("speculative_draft_model_path")
    wanted = "start it with --speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFTER"
    if drafter_expected and algorithm is None:
        raise UserError(f"{url} serves without a drafter; {wanted}")
    if drafter_expected and str(algorithm).upper() != "EAGLE3":
        raise UserError(f"{url} runs --speculative-algorithm {algorithm}, with which an EAGLE-3 drafter is never accepted; {wanted}")
    if drafter_expected and not drafter:
        raise UserError(f"{url} runs EAGLE3 without a drafter; {wanted}")
    if not drafter_expected and algorithm is not None:
        raise UserError(f"{url} is to decode plainly, and runs --speculative-algorithm {algorithm}; start it without the --speculative "
                        f"arguments")
    context = context_length(info)
    # SGLang asks for room for a last verification, else keeps two positions
    return {
        "version": info.get("version"), "model": info.get("model_path"), "dtype": info.get("dtype"), "device": info.get("device"),
        "algorithm": algorithm, "steps": info.get("speculative_num_steps"), "topk": info.get("speculative_eagle_topk"),
        "draft_tokens": info.get("speculative_num_draft_tokens"), "drafter": drafter, "tp_size": info.get("tp_size"),
        "max_running_requests": info.get("max_running_requests"), "context_length": context,
        "room": context and context - max(info.get("speculative_num_draft_tokens") or 0, 2),
    }


def server_info(url):
    """All that the server at `url` says of itself. Raises UserError where nothing or something else answers."""
    status, text = _ask(url, "/server_info")
    if status == 404:  # before SGLang 0.5.3
        status, text = _ask(url, "/get_server_info")
    info = _parse(text)
    if status != 200 or not isinstance(info, dict) or "speculative_algorithm" not in info:
        raise UserError(f"{url} is no SGLang server (status {status}, {text[:80]!r}); give the address that sglang.launch_server prints")
    return info


def check_kinds(info, where):
    """Refuse an SGLang's `info` that states something of another kind than is read of it here."""
    for words, kind, names in STATED:
        for name in names:
            value = info
            for key in name.split("."):
                value = (value or {}).get(key)
            if value is not None and not isinstance(value, kind):
                raise UserError(f"{where} says of itself {name} {json.dumps(value, default=str)[:80]}, {words} or null is wanted; use "
                                f"SGLang 0.5.23")


def context_length(info):
    """Tokens of a prompt and its answer together, None where SGLang's `info` states none; of a small KV pool max_req_input_len tells."""
    return min((info[key] + more for key, more in (("context_length", 0), ("max_req_input_len", 6)) if info.get(key)), default=None)


def answer(url, prompts, limit, eos_ids, concurrency, sampling, steps=None):
    """Answers of a server to prompts (lists of ids), `concurrency` requests in flight, as a Group in the order of the prompts.

    limit: most tokens of an answer. sampling: {temperature, top_p, top_k (0: off)}. steps: of the server's drafter, None for a
    server without one. The prefix cache is emptied first, outside the time, so that no group profits from the one before.
    Raises UserError for whatever the server refuses, and for counters that are missing or contradict the answer.
    """
    body = {"sampling_params": {"temperature": sampling["temperature"], "top_p": sampling["top_p"], "top_k": sampling["top_k"] or -1,
                                "max_new_tokens": limit, "stop_token_ids": sorted(eos_ids)}}
    _require(url, "/flush_cache?timeout=60", {})  # waits until what was cancelled before has ended
    pool = ThreadPoolExecutor(concurrency)
    try:
        start = time.perf_counter()
        replies = list(pool.map(lambda ids: generate(url, {"input_ids": ids, **body}), prompts))
        seconds = time.perf_counter() - start
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return Group([read_answer(reply, url, limit, eos_ids, steps) for reply in replies], seconds, [], [])


def read_answer(reply, url, limit, eos_ids, steps=None):
    """The Answer in one reply of SGLang to a request."""
    try:
        ids, facts = reply.get("output_ids"), reply.get("meta_info", {})
        reason = facts.get("finish_reason") or {}
        if not ids or reason.get("type") not in ("stop", "length"):
            raise UserError(f"{url}/generate sent {'ids' if ids else 'no output_ids'} and finish_reason {json.dumps(reason)}; see the "
                            f"server's log")
        if strange := [token for token in ids if type(token) is not int or not 0 <= token < 2**31]:
            raise TypeError(f"output_ids hold {strange[0]!r}")
        ids = cut(ids, limit, eos_ids)
        if reason["type"] == "length" and len(ids) < limit and ids[-1] not in eos_ids:
            raise UserError(f"{url} cut an answer after {len(ids)} of {limit} tokens; start it with a larger --context-length, or ask for "
                            f"less")
        accepted, reached = count_verifications(facts, len(ids), steps, url) if steps else ([], [])
    except (TypeError, AttributeError) as error:
        raise UserError(f"{url}/generate sent a reply of another form ({error}); use SGLang 0.5.23 or later") from None
    return Answer(ids=ids, accepted=accepted, reached=reached, candidates=[])


def count_verifications(facts, count, steps, url):
    """(accepted, reached), one int a verification, of an answer of `count` ids, out of SGLang's counters in `facts`.

    The histogram has no order, so neither have the lists. SGLang counts a verification whole that the end token or the limit
    cut, the project counts what was kept: count = 1 + sum(accepted + 1) - overshoot, one more for each time that the server
    took the request back and read it again. Of the cut one all that is left is accepted, and no depth behind it was judged. The
    counters do not say which it was: the one that accepted most is taken, totals are right with any.
    """
    histogram = facts.get("spec_correct_drafts_histogram")
    if histogram is None and count > 1:
        raise UserError(f"{url} has a drafter and sends no spec_correct_drafts_histogram with its answers; use SGLang 0.5.23 or later, "
                        f"with its Python front end (SGLANG_RUST_SERVER unset)")
    accepted = [drafts for drafts, times in enumerate(histogram or []) for _ in range(times)]
    verifications, correct, again = (facts.get(key, 0) for key in ("spec_verify_ct", "spec_num_correct_drafts", "num_retractions"))
    overshoot = 1 + again + sum(accepted) + len(accepted) - count
    most = max(accepted, default=0)
    if len(accepted) != verifications or sum(accepted) != correct or most > steps or not 0 <= overshoot <= most:
        raise UserError(f"{url} sent counters that contradict each other: histogram {histogram}, {verifications} verifications, {correct} "
                        f"accepted, {again} retractions, {count} ids, {steps} steps; its figures cannot be used")
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


def _require(url, path, body, timeout=90):
    status, text = _ask(url, path, body, timeout)
    if status != 200:
        raise UserError(f"{url}{path} answered with status {status}: {' '.join(text.split())[:400] or 'nothing'}")
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
        raise UserError(f"{url}{path} does not answer ({reason}); give the address of a running server, as http://HOST:PORT") from None


def _parse(text):
    with suppress(ValueError, RecursionError):
        return json.loads(text)
