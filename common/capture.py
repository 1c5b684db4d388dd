"""The target run by a stock SGLang: its answers, and the hidden states that our hook (common/capture_hook.py) writes inside the engine.

The engine is one of our own in this process, or a server; both are started with the same arguments, and both hand over the states
as files in a folder that both sides see: no patch, no lists of numbers over HTTP. Nothing is believed of an engine before a probe.
"""

import asyncio
import json
import os
import shlex
import shutil
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file

from common.capture_hook import PREFIX
from common.cli import Failed, UserError, say
from common.drafter import layer_ids
from common.serve import check_kinds, context_length, generate, read_answer, server_info
from common.target import process_logits

TESTED = "0.5.23"
HOOK = "common.capture_hook:write_states"
ROOT = Path(__file__).resolve().parent.parent
FILE_DTYPES = {"F32": "float32", "F16": "float16"}
IN_FLIGHT = 128  # requests: more than an engine runs at once
PATIENCE = 60  # seconds that a file may come after its reply: a network's file system shows it late
LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"  # a sample of all the target's positions, and the one token that must be asked for


def server_command(target, layers, dtype, max_length, folder, arguments=(), trust_remote_code=False):
    """The shell command that starts a stock SGLang server whose states SGLang(..., url=...) reads.

    folder: where the states pass, seen by both machines. arguments: more arguments of sglang.launch_server, a list; ours win.
    """
    command = ["python", "-m", "sglang.launch_server", *arguments,
               *_engine_arguments(target, layers, _dtype(target, dtype), max_length, folder, trust_remote_code)]
    return f"PYTHONPATH={shlex.quote(str(ROOT))} {LONGER}=1 {shlex.join(command)}"


def _engine_arguments(target, layers, dtype, max_length, folder, trust_remote_code):
    """What SGLang must be started with. Each of these has a trap behind it that `_check_settings` names."""
    hook = {"name": "states", "target_modules": ["logits_processor", "*.logits_processor"], "hook_factory": HOOK,
            "config": {"folder": str(folder)}}
    ids = _engine_layers(target, layers)
    return ["--model-path", str(target.folder), "--dtype", dtype, "--context-length", str(max_length + 8),
            "--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3",  # the name of a convention, no drafter
            *(["--return-aux-hidden-state-layer-ids", *map(str, ids)] if ids else []),
            "--disable-radix-cache", "--chunked-prefill-size", "-1", "--disable-prefill-cuda-graph", "--forward-hooks", json.dumps([hook]),
            *["--trust-remote-code"] * trust_remote_code]


def _engine_layers(target, layers):
    """What SGLang calls `layers`; None for those that it takes by itself."""
    return layer_ids(layers, target.num_layers, target.model_class).get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")


def _dtype(target, dtype):
    """That of the target's files for auto: SGLang's own auto makes float16 of float32."""
    if dtype != "auto":
        return dtype
    with safe_open(target.weights[target.lm_head_name], framework="pt") as file:
        return FILE_DTYPES.get(file.get_slice(target.lm_head_name).get_dtype(), "bfloat16")


class SGLang:
    """The target run by SGLang; a context manager. Made in the main thread, its methods may be called from any one thread at a time.

    target: Target. layers: three HF indices. dtype: "auto", "bfloat16", "float16" or "float32". max_length: most tokens of a
    sample. url: of a running server, None to start an engine in this process. folder: where the states' files pass; None: with a
    server the one it was started with, else one of our own. arguments: more arguments of sglang.launch_server for our engine, a list.

    `dtype` is the states' torch.dtype; `device`, where they are returned: a GPU that has room for the lm_head, else the CPU.
    Raises UserError for whatever is wrong with the engine, on a probe before the first sample.
    """

    def __init__(self, target, layers, dtype, max_length, url=None, folder=None, arguments=(), trust_remote_code=False):
        self.target, self.layers, self.url, self.engine, self.own_folder = target, layers, url, None, None
        self.where = url or "the engine"
        self.name, self.count = f"{PREFIX}{uuid.uuid4().hex[:12]}", 0
        dtype = _dtype(target, dtype)
        self.dtype = getattr(torch, dtype)
        self.seeds_matter = None
        try:
            if url:
                info = server_info(url)
            else:
                folder = folder or self._make_folder()
                info = self._start(_engine_arguments(target, layers, dtype, max_length, folder, trust_remote_code), arguments)
            hooks_folder = self._check_settings(info, max_length)
            self.folder = Path(folder or hooks_folder)
            if not self.folder.is_dir():
                raise UserError(f"{self.where} writes states to {self.folder}, which is no folder here; start it with a folder that both "
                                f"machines see, or name its place here with --states-folder")
            weight = target.lm_head()
            self.device = _device(weight.nbytes)
            self.weight, self.bias = weight.to(self.device, self.dtype), None
            if (bias := target.lm_head_name.removesuffix("weight") + "bias") in target.weights:
                self.bias = target.tensor(bias).to(self.device, self.dtype)
            self._probe(min(max_length, 256))
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _make_folder(self):
        """In memory, where there is enough of it: a container's /dev/shm may hold 64 MiB."""
        memory = Path("/dev/shm")
        roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30
        self.own_folder = tempfile.mkdtemp(prefix="hidden-states-", dir=memory if roomy else None)
        return self.own_folder

    def _start(self, ours, arguments):
        """Start our engine; returns what it says of itself."""
        os.environ[LONGER] = "1"
        try:
            import sglang
            from sglang.srt.server_args import prepare_server_args
        except ImportError as error:
            raise UserError(f"SGLang cannot be imported here ({error}); install requirements-sglang.txt in an environment of its own, use "
                            f"a server with --server-url, or --backend hf") from None
        try:
            settings = prepare_server_args(["--log-level", "error", *arguments, *ours])
        except (SystemExit, ValueError) as error:
            raise UserError(f"SGLang {sglang.__version__} does not take its arguments ({error}); see above and --server-arguments, or use "
                            f"--backend hf") from None
        settings.custom_sigquit_handler = _engine_failed  # SGLang's own would kill this process without a word
        try:
            self.engine = sglang.Engine(server_args=settings)
        except RuntimeError as error:
            raise Failed(f"SGLang did not start ({str(error)[:200]}); what it said is above") from None
        return self.engine.get_server_info()

    def _check_settings(self, info, max_length):
        """Name what an engine was started without. Returns the folder that its hook writes to."""
        check_kinds(info, self.where)
        folders = list(filter(None, map(_hook_folder, info.get("forward_hooks") or ())))
        ids, given = _engine_layers(self.target, self.layers), info.get("return_aux_hidden_state_layer_ids")
        graph = ((info.get("cuda_graph_config") or {}).get("prefill") or {}).get("backend", "disabled")
        chunk, room = info.get("chunked_prefill_size"), (context_length(info) or max_length + 3) - 3
        wrong = [
            (info["speculative_algorithm"] or info.get("speculative_draft_model_path"),
             f"runs a drafter (--speculative-algorithm {info['speculative_algorithm']})", "the target alone"),
            (info.get("aux_hidden_state_capture") != "eagle3", "does not capture the three layers",
             "--enable-return-aux-hidden-states --speculative-algorithm EAGLE3, and no drafter"),
            (given != ids, f"captures SGLang's layers {given or 'by default'}",
             f"--return-aux-hidden-state-layer-ids {' '.join(map(str, ids))}" if ids else "no --return-aux-hidden-state-layer-ids"),
            (not folders, "has no hook of ours", f"--forward-hooks as --dry-run prints it, and PYTHONPATH={ROOT} or its place there"),
            (not info.get("disable_radix_cache"), "has a prefix cache, behind which rows are missing", "--disable-radix-cache"),
            (chunk and chunk > 0, f"cuts prompts at {chunk} tokens, and only a last piece's rows would come", "--chunked-prefill-size -1"),
            (graph != "disabled", f"replays prompts as CUDA graphs ({graph}), in which no hook runs", "--disable-prefill-cuda-graph"),
            (info.get("enable_dp_attention"), "shares out its attention by requests", "tensor parallelism only, no --enable-dp-attention"),
            (room < max_length, f"takes samples of at most {room} tokens, and these have up to {max_length}",
             f"--context-length {max_length + 8} and memory for that many, or give --max-length {room}"),
        ]
        for fault, what, remedy in wrong:
            if fault:
                raise UserError(f"{self.where} {what}; start it with {remedy} (--dry-run prints the whole command)")
        if info.get("version") != TESTED:
            say(f"warning: {self.where} is SGLang {info.get('version')}, tried was {TESTED}; the states of a probe are checked")
        self.seeds_matter = info.get("enable_deterministic_inference")
        return folders[0]

    def _probe(self, length):
        """Two equal prompts, one after the other: a prefix cache would show, and the next token tells whose last states these are."""
        ids = [n % self.target.vocab_size for n in range(length)]
        for _ in range(2):
            [reply], [(_, last)] = self._forward([ids])
            [token] = read_answer(reply, self.where, 1, ()).ids
            logits = process_logits(self.lm_head(last[-1:]).float(), self.target.logit_softcap, self.target.logit_scale)[0]  # [V]
            gap = (logits.max() - logits[token]) / logits.abs().max() if token < len(logits) else torch.inf
            if not gap <= 0.02:  # of bfloat16 two tokens may be as good; NaN is no small gap
                raise UserError(f"{self.where} goes on with token {token}, and the lm_head of {self.target.folder} on its last state with "
                                f"{int(logits.argmax())}; is it another target? start it with --model-path {self.target.folder}")

    def answer(self, prompts, limits, sampling, seeds=None, report=None):
        """The target's answers: a list of id lists, in the order of the prompts, cut as common.decode.cut does (stop id kept).

        prompts: id lists. limits: most new tokens of each. sampling: dict of temperature, top_p, top_k (0: off), stop_ids. seeds: an
        int a prompt, None for greedy. report(ids) is called with each answer as it ends, in any order, perhaps in another thread.
        """
        if seeds and sampling["temperature"] and not self.seeds_matter:
            say(f"note: {self.where} draws answers without regard to --seed; it heeds it only with --enable-deterministic-inference")
            self.seeds_matter = True
        stops = set(sampling["stop_ids"])
        bodies = [{"input_ids": prompt, "sampling_params": {
            "temperature": sampling["temperature"], "top_p": sampling["top_p"], "top_k": sampling["top_k"] or -1,
            "max_new_tokens": limit, "stop_token_ids": sorted(stops), **({"sampling_seed": seeds[n]} if seeds else {})}}
            for n, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))]

        def ids_of(reply, n):
            ids = read_answer(reply, self.where, limits[n], stops).ids
            if report:
                report(ids)
            return ids

        return self._send(bodies, ids_of)

    def states(self, samples):
        """[(aux [T, 3H], last [T, H])], in the order of `samples`, id lists; on self.device, in self.dtype. All of the samples are in
        flight at once, and their states in memory: give some 32,768 tokens at a time."""
        return self._forward(samples)[1]

    def lm_head(self, hidden):
        """[n, V]: the target's lm_head on hidden [n, H]."""
        return F.linear(hidden, self.weight, self.bias)

    def close(self):
        if self.engine:
            self.engine.shutdown()
            self.engine = None
        if self.own_folder:
            shutil.rmtree(self.own_folder, ignore_errors=True)
        elif hasattr(self, "folder"):  # what an interruption left of ours
            for stray in self.folder.glob(f"{self.name}-*"):
                stray.unlink(missing_ok=True)

    def _forward(self, samples):
        """(replies, states) of prompts that are answered with one token: what SGLang asks for at least."""
        rids = [f"{self.name}-{self.count + n}" for n in range(len(samples))]
        self.count += len(samples)
        replies = self._send([{"input_ids": ids, "rid": rid, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
                              for ids, rid in zip(samples, rids, strict=True)], lambda reply, _: reply)
        return replies, [self._read(rid, len(ids)) for ids, rid in zip(samples, rids, strict=True)]

    def _send(self, bodies, read):
        """[read(reply, n)] of requests, all of them under way."""
        if self.url:
            pool = ThreadPoolExecutor(min(IN_FLIGHT, len(bodies) or 1))
            try:
                return list(pool.map(lambda n: read(generate(self.url, bodies[n]), n), range(len(bodies))))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

        async def one(n):
            return read(await self.engine.async_generate(**bodies[n]), n)

        async def every():
            return await asyncio.gather(*map(one, range(len(bodies))))

        try:
            return self.engine.loop.run_until_complete(every())
        except ValueError as error:
            raise UserError(f"SGLang refuses a request ({str(error)[:300]})") from None

    def _read(self, rid, count):
        """(aux [T, 3H], last [T, H]) of a request of `count` tokens, off the folder."""
        path, error, deadline = self.folder / f"{rid}.safetensors", self.folder / f"{rid}.error", time.monotonic() + PATIENCE
        while not path.exists():
            if error.exists():
                raise UserError(f"{self.where} cannot write states to {self.folder} ({error.read_text()}); make room or give "
                                f"--states-folder")
            if time.monotonic() > deadline:
                raise UserError(f"{self.where} answered, and no states came to {self.folder} in {PATIENCE} s: its hook did not run or "
                                f"writes elsewhere; start it as --dry-run prints it, with a folder that both machines see")
            time.sleep(0.002)
        try:
            tensors = load_file(path, str(self.device))
        finally:
            path.unlink()
        last = tensors.pop("last")
        aux = torch.cat([tensors[name] for name in sorted(tensors)], 1)  # [T, 3H]
        rows, hidden = last.shape
        if rows != count or len(aux) != rows:
            raise UserError(f"{self.where} sent {rows} rows of states for {count} tokens; start it with --disable-radix-cache "
                            f"--chunked-prefill-size -1")
        if hidden != self.target.hidden_size or aux.shape[1] != 3 * hidden:
            raise UserError(f"{self.where} sent states of {hidden} and {aux.shape[1]}, {self.target.folder} has {self.target.hidden_size} "
                            f"and three layers of it; start it with --model-path {self.target.folder}")
        if last.dtype != self.dtype:
            raise UserError(f"{self.where} runs in {last.dtype}, wanted is {self.dtype}; start it with --dtype "
                            f"{str(self.dtype).removeprefix('torch.')}, or give --dtype {str(last.dtype).removeprefix('torch.')}")
        return aux, last


def _hook_folder(hook):
    """Where a forward hook of an engine writes, if it is ours."""
    match hook:
        case {"hook_factory": factory, "config": {"folder": str(folder)}} if factory == HOOK:
            return folder


def _engine_failed(*_):
    raise Failed("SGLang did not start; what it said is above")


def _device(weight_bytes):
    """A GPU with room for the lm_head and what is done with it, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > 2 * weight_bytes + (2 << 30):
        return torch.device("cuda")
    return torch.device("cpu")
