"""How a drafter starts: the decision on its vocabulary, and its first weights, from scratch or from another drafter."""

from itertools import cycle

import numpy as np
import torch

from common.cli import UserError, say
from common.drafter import Drafter, captured_layers, drafter_config, load_drafter
from common.figures import accept_figures
from common.shards import check_tokenizer, other_template
from common.target import check_same_target
from common.training import TrainStep, simulate, simulated
from common.ttt import make_batch, supervised_rows
from common.vocab import check_coverage, check_size, coverage, load_map, shortened

PROBED, PROBED_TOKENS = 32, 8192  # at most so many held-out samples and tokens say what a checkpoint is worth: seconds on a CPU
DOUBTFUL = 0.4  # acceptance at the first depth from which on no fresh drafter of a few steps could be as good
FRESH_STEPS, FRESH_TOKENS = 32, 256  # what its steps are: half a minute on two cores with 49,152 rows


def decide_vocabulary(text, vocab_size):
    """Rows of the draft vocabulary from `--draft-vocab`; all of them is the full one, whichever way it is written."""
    if text == "full":
        return vocab_size
    try:
        size = int(text)
    except ValueError:
        raise UserError(f"--draft-vocab {shortened(text)} is neither full nor a number in 1..{vocab_size}") from None
    check_size(size, vocab_size)
    return size


def named_map(args, draft_vocab, target, shards, warnings):
    """(target ids int64 [D] of --vocab-map, the facts beside it), or (None, {}) for the full vocabulary. target: its facts()."""
    if draft_vocab == target["vocab_size"]:
        if args.vocab_map:
            raise UserError(f"--draft-vocab {args.draft_vocab} is the full vocabulary and takes no --vocab-map; leave one of them out")
        return None, {}
    if not args.vocab_map:
        raise UserError(f"--draft-vocab {draft_vocab} needs --vocab-map, the folder that build_vocab_map.py made for these shards "
                        f"(or --draft-vocab full, which needs none)")
    rows, facts = load_map(args.vocab_map)
    if len(rows) != draft_vocab:
        raise UserError(f"--vocab-map {args.vocab_map} has {len(rows)} rows, --draft-vocab says {draft_vocab}; name the map of that size")
    warnings.append(check_same_target(facts.get("target") or {}, target, f"the map {args.vocab_map} was", args.force))
    warnings.append(check_tokenizer(facts.get("tokenizer_sha256"), shards, f"the tokenizer of the map {args.vocab_map}", args.force))
    warnings += other_template(facts, shards.manifest, shards.folder, f"the map {args.vocab_map}")
    return torch.from_numpy(rows), facts


def start_from_checkpoint(args, draft_vocab, target, facts, shards, warnings):
    """How --init checkpoint starts: (drafter in float32, its target ids or None, what its coverage is known from, remapped).

    remapped: None, or with --remap-vocab the numbers of lm_head rows that were carried over, are new, and were dropped.
    """
    drafter, own = load_drafter(args.checkpoint, ordered=not args.remap_vocab)
    config, wanted, layers = drafter.config, drafter_config(target, draft_vocab, shards.manifest["layers"]), shards.manifest["layers"]
    for key in ("vocab_size", "hidden_size", "target_hidden_size", "rope_parameters"):
        if config[key] != wanted[key]:
            raise UserError(f"{args.checkpoint} has {key} {config[key]}, this run wants {wanted[key]}; it is no drafter for this")
    trained = config.get("training") or {}
    warnings.append(check_same_target(trained.get("target") or facts, facts, f"the checkpoint {args.checkpoint} was", args.force))
    if not trained.get("target"):
        warnings.append(f"{args.checkpoint} does not say which target it was trained for; only the sizes were compared")
    if trained.get("tokenizer_sha256"):
        what = f"the tokenizer of the checkpoint {args.checkpoint}"
        warnings.append(check_tokenizer(trained["tokenizer_sha256"], shards, what, args.force))
    warnings += other_template(trained, shards.manifest, shards.folder, f"the checkpoint {args.checkpoint}")
    if (stated := captured_layers(config, target.num_layers, args.checkpoint)) != layers:
        raise UserError(f"{args.checkpoint} is for layers {stated}, these shards hold {layers}; extract those layers")
    kept = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    drafter.config = {**wanted, **{key: config[key] for key in kept}, "torch_dtype": config["torch_dtype"]}
    if args.remap_vocab:
        rows, promise = named_map(args, draft_vocab, facts, shards, warnings)
        return drafter.train(), rows, promise, remap(drafter, own, rows, target.lm_head())
    if config["draft_vocab_size"] != draft_vocab:
        raise UserError(f"{args.checkpoint} has a draft vocabulary of {config['draft_vocab_size']}{' (full)' if own is None else ''}, "
                        f"--draft-vocab says {args.draft_vocab}; say it as the checkpoint has it, or --remap-vocab to change it")
    if args.vocab_map:
        if own is None:
            raise UserError(f"{args.checkpoint} has the full vocabulary and takes no --vocab-map; leave it out")
        if not np.array_equal(load_map(args.vocab_map)[0], own.numpy()):
            raise UserError(f"--vocab-map {args.vocab_map} is not the map of {args.checkpoint}, whose lm_head rows would mean other "
                            f"tokens; leave it out to use the checkpoint's own, or --remap-vocab to carry its rows over")
    return drafter.train(), own, trained, None


def remap(drafter, own, rows, head):
    """Give the drafter lm_head rows for the target ids `rows`, int64 [D]: its own where it has the id, else the target's, moved by the
    mean of what has moved its own rows from the target's. Unmoved ones would outbid all that were trained: going from 32,000 rows to
    49,152 the quickstart's drafter fell from 1.88 to 1.56, and with the move stayed at 1.88.

    own: int64 [D'] target ids of the drafter, in any order; None stands for all, in both; head: the target's lm_head [V, H]. Returns
    how many rows were carried over, are new, and were dropped.
    """
    own, rows = (torch.arange(len(head)) if ids is None else ids for ids in (own, rows))
    place = torch.full((len(head),), -1).index_copy_(0, own, torch.arange(len(own)))[rows]  # int64 [D]: the checkpoint's row, or -1
    carried = place >= 0
    weight = head[rows].float() + (drafter.lm_head.weight.detach() - head[own].float()).mean(0)
    weight[carried] = drafter.lm_head.weight.detach()[place[carried]]
    drafter.lm_head.weight, drafter.lm_head.out_features = torch.nn.Parameter(weight), len(rows)
    count = int(carried.sum())
    counts = {"carried": count, "new": len(rows) - count, "dropped": len(own) - count}
    say(f"draft vocabulary remapped: {count} lm_head rows are carried over, {counts['new']} are new and start from the target's, "
        f"{counts['dropped']} are dropped")
    return counts


def covered_share(args, rows, promise, shards, evaluation, warnings):
    """(coverage of the supervised tokens that are trained on, of the held-out ones or None), for target ids `rows`.

    With --follow nothing that is trained on is there yet: the first is None, and the held-out ones are what is checked. Raises UserError
    where the map covers nothing, or clearly less than its facts, `promise`, say.
    """
    if rows is None:
        return 1.0, 1.0 if args.eval_shards or shards.heldout.any() else None
    counted, aside = shards.supervised_counts()
    if args.eval_shards:
        counted, aside = counted + aside, sum(evaluation.supervised_counts())
    covered, unseen = coverage(aside if args.follow else counted, rows.numpy()), coverage(aside, rows.numpy())
    if covered is None:
        raise UserError("--follow with a reduced draft vocabulary needs held-out samples, or --eval-shards, to see what the map covers")
    if not covered:
        raise UserError("no supervised token is in the draft vocabulary: the map was counted on other data; make one for these shards")
    what = f"the map {args.vocab_map}" if args.vocab_map else f"the draft vocabulary of {args.checkpoint}"
    warnings.append(check_coverage(covered, promise, what, args.force))
    if promise and promise.get("coverage") is None and promise.get("coverage_heldout") is None:
        warnings.append(f"{what} states no coverage: nothing was compared with the {covered:.2%} that it covers here")
    if covered < 0.5 or len(rows) == 1:
        warnings.append(f"the draft vocabulary of {len(rows)} covers {covered:.2%} of the supervised tokens: little can be drafted")
    return None if args.follow else covered, unseen


def start_from_scratch(drafter, target, head, map_rows, init_layer):
    """lm_head rows start as the target's rows; the rest small and random, or as the target's last layer wherever that fits.

    As the target's layer: q, k, v see the same weights for both halves of their input, halved; fc passes the last captured
    state through; the final norm is the target's.
    """
    random = 0.1 if init_layer == "target" else 1.0  # fc starts near to passing through
    parts = {}  # parameter -> tensor of the target, by the ends of their names
    if init_layer == "target":
        last = f"layers.{target.num_layers - 1}."
        same = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
                "mlp.down_proj", "input_layernorm")
        mlp_norm = "pre_feedforward_layernorm" if target.find(f"{last}pre_feedforward_layernorm.weight") else "post_attention_layernorm"
        sources = {**dict(zip(same, same, strict=True)), "hidden_norm": "input_layernorm", "post_attention_layernorm": mlp_norm}
        parts = {f"midlayer.{name}.weight": f"{last}{source}.weight" for name, source in sources.items()}
        parts["norm.weight"] = "norm.weight"
    spread = target.text.get("initializer_range") or 0.02
    copied = 0
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, spread * (random if name == "fc.weight" else 1.0))
            source = target.find(parts[name]) if name in parts else None
            if source is None:
                continue
            tensor = target.tensor(source).float()
            if "norm" in name and target.model_class.startswith("Gemma"):
                tensor = tensor + 1.0  # Gemma's norms multiply by 1 + w
            if tensor.dim() == 2 and tensor.shape[1] * 2 == parameter.shape[1]:
                tensor = torch.cat([tensor, tensor], dim=1) / 2
            if tensor.shape == parameter.shape:
                parameter.copy_(tensor)
                copied += 1
        if init_layer == "target":
            hidden = target.hidden_size
            drafter.fc.weight[:, 2 * hidden :] += torch.eye(hidden)
            say(f"{copied} of {len(parts)} tensors of the layer start as the target's last layer and final norm, the rest random")
        drafter.lm_head.weight.copy_(head if map_rows is None else head[map_rows])


def probe(args, target, drafter, embedding, teacher, rows, training, heldout):
    """What a checkpoint is worth before its first step, beside the best constant guess and, where that is in doubt, a fresh drafter.

    training, heldout: (Shards, numbers of samples). Every process computes the same. Returns the figures, with the `warning` that they
    call for or None. Raises UserError for a checkpoint that is worth nothing here, if not forced.
    """
    (shards, inside), unseen = heldout, training[1]
    if not len(inside):  # half of few samples are left to the fresh drafter
        shards, inside = training[0], training[1][: (len(training[1]) + 1) // 2]
    inside = inside[:PROBED]
    inside = inside[: max(1, int(shards.index[inside, 2].cumsum().searchsorted(PROBED_TOKENS, side="right")))]
    if shards is training[0]:
        unseen = np.setdiff1d(unseen, inside)

    counts = simulated(drafter, embedding, rows, shards, inside, args.eval_steps)  # [S, 2, K]
    length, acceptance = accept_figures(*counts.sum(0).tolist())
    guesses = constant_guess(shards, inside, args.eval_steps)
    constant, _ = accept_figures(*guesses.sum(0).tolist())
    figures = {"accept_length": length, "acceptance": acceptance, "constant": constant, "fresh": None, "fresh_steps": 0,
               "samples": len(inside), "warning": None}
    if length is None:
        figures["warning"] = f"whether {args.checkpoint} fits here was not measured: no answer of three tokens is there to draft"
        say(f"warning: {figures['warning']}")
        return figures
    drawn, fresh, beside = length - constant <= 2 * scatter(counts, guesses), None, ""
    if (drawn or acceptance[0] < DOUBTFUL) and len(unseen):
        say(f"{args.checkpoint} starts at an accept length of {length:.3f}: a fresh drafter learns for a moment, to compare")
        yardstick, steps = train_fresh(args, target, embedding, teacher, rows, training[0], unseen)
        fresh, _ = accept_figures(*simulated(yardstick, embedding, rows, shards, inside, args.eval_steps).sum(0).tolist())
        figures["fresh"], figures["fresh_steps"] = fresh, steps
        beside = f", a fresh drafter reaches {fresh:.3f} after {steps} steps"
    sentence = (f"{args.checkpoint} starts at an accept length of {length:.3f} on {len(inside)} samples here (best constant guess "
                f"{constant:.3f}){beside}")
    if (drawn and (fresh is None or length <= fresh)) or (fresh is not None and length - 1 < (fresh - 1) / 2):
        figures["warning"] = (f"{sentence}: it was made for another model, has learnt nothing yet, or its vocabulary lacks what is said "
                              f"here")
        if not args.force:
            raise UserError(f"{figures['warning']}; train from scratch (--init scratch), or --force to go on")
    elif drawn or (fresh is not None and length < fresh):
        figures["warning"] = f"{sentence}: it is of little use here; --init scratch may well be better"
    say(f"warning: {figures['warning']}" if figures["warning"] else sentence)
    return figures


def constant_guess(shards, samples, steps):
    """The counts of `simulate`, int64 [S, 2, steps], for always drafting the one token that the target chooses most often."""
    parts = [shards.sample(int(number), ("input_ids", "loss_mask", "target_argmax")) for number in samples]
    choices = torch.cat([part["target_argmax"][:-1][part["loss_mask"][1:] == 1] for part in parts])
    best = choices.bincount().argmax() if len(choices) else -1
    counts = []
    for part in parts:
        mask, bounds = part["loss_mask"].bool(), [0, len(part["loss_mask"])]
        rows, supervised = supervised_rows(mask, bounds, steps)
        later = (rows + torch.arange(1, steps + 1)[:, None]).clamp(max=bounds[1] - 1)  # [K, R] the row that decides
        counts.append(simulate(mask, bounds, rows, supervised & (part["target_argmax"][later] == best)))
    return torch.cat(counts)


def scatter(counts, others):
    """Standard error of the difference of two accept lengths, from the counts of `simulate` for the same samples, [S, 2, K] each."""
    apart = 0.0
    for sign, part in ((1, counts.double()), (-1, others.double())):
        accepted, starts = part[:, 1].sum(1), part[:, 0, 0]  # [S]
        apart = apart + sign * (accepted - starts * accepted.sum() / starts.sum()) / starts.sum()
    return float(apart.square().sum().sqrt())


def train_fresh(args, target, embedding, teacher, rows, shards, samples):
    """(A drafter that starts from scratch and learns the first depth for a few quick steps, how many): a yardstick, not a training."""
    torch.manual_seed(args.seed)
    device = embedding.device
    drafter = Drafter(drafter_config(target, teacher.buffer.columns, shards.manifest["layers"]))
    start_from_scratch(drafter, target, target.lm_head(), None if rows is None else rows.cpu(), "target")
    drafter.lm_head.weight.requires_grad_(False)  # it starts as the target's rows, and would cost as much as all the rest
    step = TrainStep(drafter.to(device), embedding, teacher, 1, 1.0)
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1.2 / target.hidden_size, betas=(0.9, 0.95), weight_decay=0.0)
    order, tokens, number = cycle(np.random.default_rng(args.seed).permutation(samples).tolist()), 0, 0
    while number < FRESH_STEPS and tokens < 4 * FRESH_STEPS * FRESH_TOKENS:
        chosen, size = [], 0
        while size < FRESH_TOKENS:
            chosen.append(next(order))
            size += int(shards.index[chosen[-1], 2])
        for group in optimizer.param_groups:
            group["lr"] = 1.2 / target.hidden_size * min(1, (number + 1) / 5)
        loss, _, _ = step(make_batch([shards.sample(sample) for sample in chosen], device), 1 / max(1, shards.index[chosen, 5].sum()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens, number = tokens + size, number + 1
    return drafter.eval(), number
