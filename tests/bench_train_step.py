"""Time and memory of one training step on random data: forward, backward, gradient norm and clipping, fused
AdamW.

One document, random weights, TTT 7; no files are read. Each case has a process of its own, and they take
turns step by step, so that noise hits all alike. All stay in memory meanwhile, about 10 GB on a CPU.

  default   hidden 576, vocabulary 49,152, draft vocabulary 32,000, 512 tokens, all supervised, bf16 autocast
  half      the first half of the tokens is not supervised       frozen    the lm_head is not trained
  full      draft vocabulary = vocabulary, without a map         fp32      without autocast
  textbook  --textbook: the default's model, loss and optimizer in plain autograd, as trainers usually write
  them

seconds is the median, loss the first step's. peak_gib: on a CPU the largest resident set that the process
ever had, Python, torch and weights included; on CUDA the most that torch had allocated. floor: FLOP over the
rate of bare products [2048, H] x [H, D] in the case's dtype (median; three a round, in turn with the cases).
FLOP is what the step cannot do without, twice the multiply-adds: with n tokens, the first s not supervised, K
depths, H hidden, I intermediate, A = heads * head_dim, B = kv_heads * head_dim, D draft rows, f = max(0,
s-K-1) the first row needed, R_k = n-k-2-f rows and L_k = n-max(s, k+2) labels at depth k,
  FLOP = 2 (3 H D sum L_k + H D (n-max(s, 2)) + 2 * 3H H n + 3 * 2H 2B (n + sum_{k>0} R_k)
            + 3 (2H A + A H + 3 H I) sum R_k + 3 * 2 A sum_k sum_{t=f}^{f+R_k-1} (t+1+k))
for head, teacher, fc, keys and values, the rest of the layer, attention. 3 is the forward product and two
backward; a frozen head has one less, and so has fc, whose input needs no gradient; the teacher has none.
"""

import multiprocessing
import resource
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.nn.functional as F

from common.cli import Parser, UserError, positive_int, run, say
from common.drafter import Drafter
from common.loss import Teacher, TrainStep
from common.ttt import make_batch

DEPTHS, DECAY = 7, 0.8
PLAIN = dict(hidden_size=576, target_hidden_size=576, intermediate_size=1536, num_attention_heads=9,
             num_key_value_heads=3, head_dim=64,
             vocab_size=49152, draft_vocab_size=32000, max_position_embeddings=32768, rms_norm_eps=1e-5,
             tokens=512, supervised=1.0,
             rope_parameters={"rope_type": "default", "rope_theta": 1e5}, frozen=False, dtype=torch.bfloat16,
             textbook=False)
CASES = dict(default={}, half=dict(supervised=0.5), frozen=dict(frozen=True),
             full=dict(draft_vocab_size=49152),
             fp32=dict(dtype=torch.float32))
LONG = dict(hidden_size=64, target_hidden_size=64, intermediate_size=256, num_attention_heads=2,
            num_key_value_heads=2, head_dim=32,
            vocab_size=163840, draft_vocab_size=163840, tokens=16384)


def arguments():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES),
        help="default all of these: they show what each choice costs")
    add("--textbook", action="store_true",
        help="also the plain way; fail if its first loss is over 1 %% or its first gradient of fc over "
        "5 %% off that of the default case; default off, as it is slow")
    add("--long", action="store_true",
        help="instead, one cold step on 16,384 tokens with hidden size 64 and a full draft vocabulary of "
        "163,840, which is to fit in 24 GB; default off, as it takes long")
    add("--tokens", type=positive_int,
        help="length of the document; default 512, a usual conversation, with --long 16,384")
    add("--rounds", type=positive_int, default=9,
        help="steps timed, after two untimed; default 9, against noise; --long times one")
    add("--device", default="cpu", choices=["cpu", "cuda"][: 1 + torch.cuda.is_available()],
        help="default cpu, which everybody has")
    add("--threads", type=positive_int, default=torch.get_num_threads(),
        help="CPU threads; default %(default)s, torch's choice here")
    return parser.parse_args()


def main():
    args = arguments()
    if args.tokens and args.tokens < 2 * DEPTHS:
        raise UserError(f"--tokens {args.tokens} is too short for depth {DEPTHS}; "
                        f"{2 * DEPTHS} or more is wanted")
    cases = {name: PLAIN | CASES[name] for name in args.cases}
    if args.textbook:
        cases = {"default": PLAIN} | cases | {"textbook": PLAIN | {"textbook": True}}
    if args.long:
        cases = {"long": PLAIN | LONG}
    untimed, rounds = (0, 1) if args.long else (2, args.rounds)
    spawn, pipes = multiprocessing.get_context("spawn"), {}
    for name, case in cases.items():
        case["tokens"] = args.tokens or case["tokens"]
        pipes[name], end = spawn.Pipe()
        spawn.Process(target=work, args=(end, case, args.device, args.threads), daemon=True).start()
        end.close()
    torch.set_num_threads(args.threads)
    hidden, width, products = case["hidden_size"], (LONG if args.long else PLAIN)["draft_vocab_size"], {}
    for dtype in dict.fromkeys(case["dtype"] for case in cases.values()):
        x, weight = (torch.randn(size, hidden, device=args.device, dtype=dtype) for size in (2048, width))
        out = x.new_empty(2048, width)  # not allocated anew: fresh pages would cost as much as the product
        products[dtype] = partial(torch.mm, x, weight.T, out=out)
    answers, product_times = {name: [] for name in cases}, {dtype: [] for dtype in products}
    for number in range(untimed + rounds):
        for name, pipe in pipes.items():
            try:
                pipe.send(number == 0)
                answers[name].append(pipe.recv())
            except (EOFError, ConnectionError):
                raise RuntimeError(f"the process of {name} ended: its error stands above, "
                                   "or else memory ran out") from None
        for dtype, product in products.items():
            for _ in range(3):
                start = time.perf_counter()
                product()[0, 0].item()  # waits for the device
                product_times[dtype].append(time.perf_counter() - start)
        say(f"round {number + 1} of {untimed + rounds}")
    rates = {dtype: 2 * 2048 * hidden * width / median(times[3 * untimed :])
             for dtype, times in product_times.items()}
    rows = []
    for name, case in cases.items():
        times = [seconds for seconds, *_ in answers[name][untimed:]]
        seconds, floor = median(times), flop(case) / rates[case["dtype"]]
        rows.append({"case": name, "seconds": seconds, "min": min(times), "max": max(times),
                     "tokens/s": case["tokens"] / seconds,
                     "peak_gib": answers[name][-1][1] / 2**30, "tflop": flop(case) / 1e12, "floor": floor,
                     "seconds/floor": seconds / floor, "loss": answers[name][0][2]})
    bare = ", ".join(f"{dtype}: {rate / 1e9:.0f} GFLOP/s" for dtype, rate in rates.items())
    say(f"\ntorch {torch.__version__}, {args.device}, {args.threads} threads, {rounds} rounds; "
        f"bare products of {bare}")
    for line in (rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows)):
        say("| " + " | ".join(cell if isinstance(cell, str) else f"{cell:.4g}" for cell in line) + " |")
    if "textbook" in cases:
        (*_, loss, gradient), (*_, plain_loss, plain_gradient) = answers["default"][0], answers["textbook"][0]
        loss_off = abs(loss / plain_loss - 1)
        gradient_off = np.linalg.norm(gradient - plain_gradient) / np.linalg.norm(plain_gradient)
        say(f"the first loss of default is {loss_off:.3%} off textbook's, "
            f"its first gradient of fc {gradient_off:.2%}")
        assert loss_off < 0.01 and gradient_off < 0.05, "textbook and default do not compute the same"
    return {"device": args.device, "threads": args.threads, "rounds": rounds, "torch": torch.__version__,
            "cases": rows}


def flop(case):
    """Twice the multiply-adds of a step, by the formula above."""
    n, hidden, inner = case["tokens"], case["hidden_size"], case["intermediate_size"]
    a, b = case["num_attention_heads"] * case["head_dim"], case["num_key_value_heads"] * case["head_dim"]
    prompt, head = n - int(n * case["supervised"]), hidden * case["draft_vocab_size"]
    first = max(0, prompt - DEPTHS - 1)
    rows = [n - k - 2 - first for k in range(DEPTHS)]
    attended = sum(t + 1 + k for k, count in enumerate(rows) for t in range(first, first + count))
    labels = sum(n - max(prompt, k + 2) for k in range(DEPTHS))
    return 2 * ((2 if case["frozen"] else 3) * head * labels + head * (n - max(prompt, 2))
                + 2 * 3 * hidden**2 * n + 3 * 2 * hidden * 2 * b * (n + sum(rows[1:]))
                + 3 * (2 * hidden * a + a * hidden + 3 * hidden * inner) * sum(rows) + 3 * 2 * a * attended)


def work(pipe, case, device, threads):
    """A case's process: a step a message, answered by (seconds, peak bytes, loss, clipped gradient of fc if
    the message is True).
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    names = ("hidden_size", "tokens", "vocab_size", "draft_vocab_size", "dtype")
    hidden, tokens, vocab, draft_vocab, dtype = (case[name] for name in names)
    drafter = Drafter(case)
    embedding = (torch.randn(vocab, hidden) * 0.1).bfloat16().to(device)
    lm_head = (torch.randn(vocab, hidden) / hidden**0.5).bfloat16()
    rows = None if draft_vocab == vocab else torch.randperm(vocab)[:draft_vocab].sort().values
    drafted = lm_head if rows is None else lm_head[rows]
    last = (torch.randn(tokens, hidden) * 3).bfloat16()  # logits with a deviation of 3: some tokens stand out
    # a draft row, so that every label counts
    choice = torch.cat([(part @ drafted.T).argmax(-1) for part in last.split(128)])
    mask = torch.arange(tokens) >= tokens - int(tokens * case["supervised"])
    batch = make_batch([dict(
        input_ids=torch.randint(0, vocab, (tokens,), dtype=torch.int32), loss_mask=mask.to(torch.uint8),
                             last_hidden_state=last,
        aux_hidden_states=torch.randn(tokens, 3 * hidden).bfloat16(),
                             target_argmax=choice if rows is None else rows[choice])], device)
    drafter.lm_head.weight.data.copy_(drafted)
    drafter.to(device).lm_head.weight.requires_grad_(not case["frozen"])
    if case["textbook"]:
        train_step = partial(textbook_step, drafter, embedding, lm_head.to(device), rows.to(device))
    else:
        train_step = TrainStep(drafter, embedding, Teacher(lm_head, rows, None, 1.0, device, dtype), DEPTHS,
                               DECAY)
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step():
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss, _, _ = train_step(batch, 1 / int(mask[2:].sum()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        return loss.item()  # waits for the device

    with suppress(EOFError, KeyboardInterrupt):  # the end is the parent's
        for first in iter(pipe.recv, None):
            start = time.perf_counter()
            loss, seconds = step(), time.perf_counter() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            if device == "cuda":
                peak = torch.cuda.max_memory_allocated()
            pipe.send((seconds, peak, loss, drafter.fc.weight.grad.cpu().numpy() if first else None))


def textbook_step(drafter, embedding, lm_head, rows, batch, scale):
    """The loss as TrainStep returns it, for one document: every row at every depth, all in tensors that
    autograd keeps.
    """
    ids, n, group = F.pad(batch["input_ids"],
                          (0, DEPTHS)), len(batch["input_ids"]), drafter.heads // drafter.kv_heads
    position = torch.arange(n, device=ids.device)
    with torch.no_grad():
        # [T+K, D]
        p = F.pad(F.linear(batch["last_hidden_state"], lm_head)[:, rows].float().softmax(-1),
                  (0, 0, 0, DEPTHS))
        # of a label, taught by the row before it
        counts = batch["loss_mask"] & torch.isin(batch["target_argmax"], rows).roll(1)
    hidden = drafter.fc(batch["aux_hidden_states"].to(drafter.fc.weight.dtype))
    keys, values, loss = [], [], 0.0
    for depth in range(DEPTHS):
        fused = drafter.fuse(embedding[ids[depth + 1 : depth + 1 + n]].to(hidden.dtype), hidden)
        q = drafter.queries(fused, position + depth) * drafter.head_dim**-0.5  # [T, heads, d]
        # [T, heads, d]
        k, v = (x.repeat_interleave(group, 1) for x in drafter.keys_values(fused, position + depth))
        keys, values = [*keys, k], [*values, v]
        scores = torch.einsum("thd,shd->hts", q, keys[0])  # [heads, T, T+depth]
        scores = scores.masked_fill(position > position[:, None], float("-inf"))
        scores = torch.cat([scores, *((q * own).sum(-1).T[..., None] for own in keys[1:])], -1)
        weights = scores.float().softmax(-1).to(v.dtype)
        attended = torch.einsum("hts,shd->thd", weights[..., :n], values[0])
        attended = attended + sum(weights[..., n + i].T[..., None] * own for i, own in enumerate(values[1:]))
        hidden = drafter.finish_layer(hidden, attended.reshape(n, -1))
        mask = F.pad(counts, (0, depth + 2))[depth + 2 :, None]
        log_q = drafter.lm_head(drafter.norm(hidden)).float().log_softmax(-1)  # [T, D]
        loss = loss - DECAY**depth * scale * (mask * p[depth + 1 : depth + 1 + n] * log_q).sum()
    return loss, None, None


if __name__ == "__main__":
    run(main, "nothing was written")
