"""One hundred faults for ``mutations.py``: of each, what it is called, its kind, a text of ``src`` that occurs once, and another.

They were chosen by reading the code, not the tests, so that the tests can be judged by them. Each changes what somebody gets:
a number, a refusal, a file. A text that is found no more, or more than once, stops the script: mend it here.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault; ``why`` says who would suffer from it."""

    name: str
    kind: str
    old: str
    new: str
    why: str


def _faults(kind: str, *rows: tuple[str, str, str, str]) -> list[Fault]:
    return [Fault(name, kind, old, new, why) for name, old, new, why in rows]


FAULTS = [
    *_faults(
        "sign",
        (
            "deepspeed-start",
            "yield Fragment(name, kind, vector[low - first : high - first], shape, start=low - offset)",
            "yield Fragment(name, kind, vector[low - first : high - first], shape, start=offset - low)",
            "a checkpoint of DeepSpeed is put together in wrong places",
        ),
        (
            "decay-grows",
            'return ratio * s["negative_step_size"] + s["negative_decay"] * w, m, v',
            'return ratio * s["negative_step_size"] - s["negative_decay"] * w, m, v',
            "AdamW's weight decay lets weights grow",
        ),
        (
            "muon-decay",
            "return o * -size - w * _decay(options), {",
            "return o * -size + w * _decay(options), {",
            "Muon's decay lets weights grow",
        ),
        (
            "amax-margin",
            "amax = torch.where(seen > 0, seen * 2.0**cast.margin, own)",
            "amax = torch.where(seen > 0, seen * 2.0**-cast.margin, own)",
            "delayed scales saturate where they should leave room",
        ),
        (
            "interval-low",
            "return self.mean - self.half",
            "return self.mean + self.half",
            "the lower end of an interval is its upper end",
        ),
        (
            "difference-of-plans",
            "return self.after - self.before",
            "return self.before - self.after",
            "a plan that became slower is said to have become faster",
        ),
        (
            "climb-margin",
            "climbs.append(level - margin - self._lowest[span])",
            "climbs.append(level + margin - self._lowest[span])",
            "slow divergence is told of noise",
        ),
    ),
    *_faults(
        "off by one in a shift",
        (
            "eps",
            'return 1.0 if self.kind == "int" else math.ldexp(1.0, -self.mantissa_bits)',
            'return 1.0 if self.kind == "int" else math.ldexp(1.0, -self.mantissa_bits - 1)',
            "every table of formats states half the spacing",
        ),
        (
            "dither-start",
            "left = missing - start",
            "left = missing - start - 1",
            "random bits of stochastic rounding are cut from another place",
        ),
        ("half-bit", "return 1 << dropped >> 1", "return 1 << dropped >> 2", "rounding to the nearest rounds down"),
        (
            "sign-place",
            "place = shift + code.bits - 1\n    return step",
            "place = shift + code.bits - 2\n    return step",
            "the sign of a packed moment is lost",
        ),
        (
            "fold-bits",
            "return (z >> places) & ((1 << (64 - places)) - 1)",
            "return (z >> places) & ((1 << (63 - places)) - 1)",
            "fingerprints of older records match no more",
        ),
        (
            "nibble",
            "return (low & 15) | (high << 4)",
            "return (low & 15) | (high << 3)",
            "two codes of four bits overlap in a byte",
        ),
        (
            "ties-to-even",
            "addend = (mask >> 1) + ((significand >> dropped) & mask & 1)",
            "addend = (mask >> 1) + ((significand >> (dropped + 1)) & mask & 1)",
            "ties go the wrong way in round_to",
        ),
        (
            "tail-half",
            "visible = _in_range(storage, (whole + half(below)) & -(1 << below))",
            "visible = _in_range(storage, (whole + half(below - 1)) & -(1 << below))",
            "the weight that the model sees is not the nearest",
        ),
    ),
    *_faults(
        "off by one",
        (
            "flash-exponent",
            "exponent = (torch.frexp(weight.float()).exponent - 1).clamp(min=least)",
            "exponent = torch.frexp(weight.float()).exponent.clamp(min=least)",
            "a foreign checkpoint's weights lose half of their error bits",
        ),
        (
            "exponents",
            'exponents = low + torch.arange(number, dtype=torch.int64, device="cpu") % (high - low)',
            'exponents = low + torch.arange(number, dtype=torch.int64, device="cpu") % (high - low + 1)',
            "a machine's arithmetic is measured on other values than an older record's",
        ),
        (
            "adam-step",
            "correction1 = 1 - beta1**step",
            "correction1 = 1 - beta1 ** (step + 1)",
            "the bias correction is that of the next step",
        ),
        (
            "window-of-validation",
            "num_windows = max(0, (self.num_valid_tokens - 1) // sequence_length)",
            "num_windows = max(0, self.num_valid_tokens // sequence_length)",
            "the last validation window has a token too few",
        ),
        (
            "feistel",
            "half = np.uint64(max(3, ((num_windows - 1).bit_length() + 1) // 2))",
            "half = np.uint64(max(3, ((num_windows - 1).bit_length() + 2) // 2))",
            "another order of the data: no run is repeated",
        ),
        (
            "rounds",
            "numbers = range(rank, rank + size * -(-num_micro_batches // size), size)",
            "numbers = range(rank, rank + size * (num_micro_batches // size), size)",
            "micro-batches that do not divide by the ranks are left out",
        ),
        (
            "skipped-batches",
            "for each in skipped if each.step <= step)",
            "for each in skipped if each.step < step)",
            "after a rollback the bad batch comes again",
        ),
        (
            "consecutive",
            "begins = not self.is_active and self.num_bad >= detector.consecutive",
            "begins = not self.is_active and self.num_bad > detector.consecutive",
            "alarms are raised a value late",
        ),
        (
            "learning-rate-step",
            "rate = self.config.learning_rate(self.step + 1)",
            "rate = self.config.learning_rate(self.step)",
            "the schedule is a step behind",
        ),
        (
            "age",
            "usable = (buffer[_STEP] >= 0) & (age > 0) & (age <= cast.history)",
            "usable = (buffer[_STEP] >= 0) & (age >= 0) & (age <= cast.history)",
            "a delayed scale sees its own step: other micro-batches change it",
        ),
        (
            "shards-ceiling",
            "rows = -(-tensor.shape[0] // mesh.size(axis))",
            "rows = tensor.shape[0] // mesh.size(axis)",
            "fingerprints of uneven shards are those of no whole tensor",
        ),
        (
            "degrees",
            "sum(s**2 / (len(cell) - 1) for s, cell",
            "sum(s**2 / len(cell) for s, cell",
            "intervals of few seeds are too narrow",
        ),
    ),
    *_faults(
        "swapped moment or operand",
        (
            "residual",
            "weights = [*residual_weights(2 * index, len(layers)), *residual_weights(2 * index + 1, len(layers))]",
            "weights = [*residual_weights(2 * index + 1, len(layers)), *residual_weights(2 * index, len(layers))]",
            "attention and MLP have each other's share of the residual stream",
        ),
        (
            "betas",
            "return 1 - beta1, 1 - beta2, -lr / correction1, 1 / correction2, eps",
            "return 1 - beta2, 1 - beta1, -lr / correction1, 1 / correction2, eps",
            "both moments are averaged over the other's window",
        ),
        (
            "square-first",
            "return values if is_first else values * values",
            "return values * values if is_first else values",
            "a foreign checkpoint's moments are read as each other",
        ),
        (
            "moment-role",
            '(state, "exp_avg_sq" if state in self.squares else "exp_avg")',
            '(state, "exp_avg" if state in self.squares else "exp_avg_sq")',
            "moments are kept in each other's code",
        ),
        (
            "low-high",
            "even, odd = [float_of(word << 16) for word in words], [float_of(word & UPPER) for word in words]",
            "odd, even = [float_of(word << 16) for word in words], [float_of(word & UPPER) for word in words]",
            "neighbouring gradients are summed into each other",
        ),
        ("dd-de", "append((dd, de))", "append((de, dd))", "stalls are overlooked: EDQ is read upside down"),
        (
            "lr-factor",
            'group["lr"] = rate * group.get("lr_factor", 1.0)',
            'group["lr"] = rate / group.get("lr_factor", 1.0)',
            "matrices and vectors of unit scaling learn at each other's rates",
        ),
        (
            "batch-split",
            "return [by_rank[number % here.size][number // here.size] for number in range(num_micro_batches)]",
            "return [by_rank[-1 - number % here.size][number // here.size] for number in range(num_micro_batches)]",
            "losses of micro-batches are added up in an order that depends on the ranks",
        ),
    ),
    *_faults(
        "dropped rank",
        (
            "titan-batch",
            'micro_batch = training["local_batch_size"] * self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard',
            'micro_batch = training["local_batch_size"] * self.parallel_dims.dp_shard',
            "comparisons take runs of other batches for alike",
        ),
        (
            "replicas",
            "divisor = self.grid.size if self.average else 1",
            "divisor = self.grid.shards if self.average else 1",
            "gradients of replicas are averaged over too few ranks",
        ),
        (
            "used-elsewhere",
            "dist.all_reduce(used, dist.ReduceOp.MAX, group=self.grid.group)",
            "pass",
            "a parameter that another rank alone uses is not stepped",
        ),
        (
            "late-rank",
            "if any(step > fewest for step, _, _ in answers):",
            "if all(step > fewest for step, _, _ in answers):",
            "the rank that others wait for is not named",
        ),
        (
            "audit-join",
            "row[:-1], row[-1] = mine[parameter][0].cpu(), mine[parameter][1]",
            "row[:-1], row[-1] = mine[parameter][0].cpu(), 0",
            "audits of sharded tensors are dropped",
        ),
        (
            "norm-groups",
            'steps = torch.stack([add_up(steps_of(members, scales), groups, "sum") for groups, members in parts])',
            "steps = torch.stack([steps_of(members, scales) for groups, members in parts])",
            "each rank clips by the norm of its own shard",
        ),
        (
            "straggler",
            "self._late[rank] += count * late",
            "self._late[rank] += late",
            "a straggler's delay is that of one step",
        ),
        (
            "verify",
            "places = (table != table[0]).any(0).nonzero().flatten().tolist()",
            "places = (table[:1] != table[0]).any(0).nonzero().flatten().tolist()",
            "replicas that differ are not seen",
        ),
        (
            "exchange-order",
            "places = [shard * grid.replicas + replica for replica, shard in grid.places]",
            "places = [replica * grid.shards + shard for replica, shard in grid.places]",
            "hybrid shards get each other's gradients",
        ),
    ),
    *_faults(
        "skipped check",
        (
            "text-column",
            "if key in texts and not isinstance(value, (str, type(None))):",
            "if key in texts and not isinstance(value, (str, int, type(None))):",
            "a number is written into a column of text",
        ),
        (
            "checkpoint-digest",
            "if digest(file) != record.checksum:",
            "if False:",
            "a flipped bit in a checkpoint is loaded",
        ),
        (
            "checkpoint-size",
            'raise ValueError("a file is not in this folder")',
            "pass",
            "a manifest may name files anywhere",
        ),
        (
            "line-checksum",
            'raise ValueError("it does not match its checksum")',
            "return False",
            "a damaged line of a run is read as sound",
        ),
        ("zip-name", "or not name.isprintable()", "or False", "an archive may hold names that a terminal obeys"),
        (
            "writable-kernel",
            "return stat.S_ISREG(found.st_mode) and _is_own(found) and not found.st_mode & OTHERS_WRITE",
            "return stat.S_ISREG(found.st_mode) and _is_own(found)",
            "compiled code that others can write is run",
        ),
        (
            "odd-keys",
            "if strange := sorted(given - wanted.keys()) or sorted(wanted.keys() - given):",
            "if strange := sorted(given - wanted.keys()):",
            "a state that lacks a moment is loaded",
        ),
        (
            "finite-loss",
            "if loss_spike is None and loss is not None and math.isfinite(loss):",
            "if loss_spike is None and loss is not None:",
            "a loss that is not finite enters the window of spikes",
        ),
        (
            "resume-changes",
            "if before is not None and before != now:",
            "if before is not None and before == now:",
            "a resume accepts changed data or software",
        ),
    ),
    *_faults(
        "wrong unit or factor",
        (
            "key-values",
            "attention = 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size * key_value_size",
            "attention = 2 * self.hidden_size * self.hidden_size + self.hidden_size * key_value_size",
            "a model has fewer parameters than it has",
        ),
        (
            "root-below",
            "while 4 * power * power <= count:",
            "while 2 * power * power <= count:",
            "scalify's scales of sums are off",
        ),
        (
            "decibel",
            "return 10 * torch.log10(torch.where(",
            "return 20 * torch.log10(torch.where(",
            "sqnr_db doubles",
        ),
        (
            "ring-back",
            '"both ways": lambda size: 2 * (size - 1) / size,',
            '"both ways": lambda size: (size - 1) / size,',
            "an all-reduce counts half of its bytes",
        ),
        (
            "flops",
            "flops = 2.0 * num_tokens * shape.num_weights\n",
            "flops = num_tokens * shape.num_weights\n",
            "matmuls are predicted twice as fast",
        ),
        (
            "bits-to-bytes",
            "return Bytes(visible, visible, sum(width_of(group) for group in storage.packing) / 8)",
            "return Bytes(visible, visible, sum(width_of(group) for group in storage.packing) / 4)",
            "plans take optimizer states for twice as large",
        ),
        (
            "bandwidth",
            "latency = (path.ranks - path.nodes) * path.link_latency + (path.nodes - 1) * path.network_latency",
            "latency = (path.ranks - path.nodes) * path.network_latency + (path.nodes - 1) * path.link_latency",
            "links inside a node have the network's latency",
        ),
        (
            "token-mean",
            "count: int = sum(batch.shape[0] * (batch.shape[1] - 1) for batch in batches)",
            "count: int = sum(batch.shape[0] * batch.shape[1] for batch in batches)",
            "validation losses are too low",
        ),
    ),
    *_faults(
        "wrong axis",
        (
            "row-amax",
            'along = {"tensor": (0, 1), "row": (dim,), "column": (1 - dim,)}[cast.granularity]',
            'along = {"tensor": (0, 1), "row": (1 - dim,), "column": (dim,)}[cast.granularity]',
            "scales by row are by column",
        ),
        (
            "block-sides",
            "return sides if dim == 1 else sides[::-1]",
            "return sides",
            "blocks lie across the contraction",
        ),
        (
            "adjust-lr",
            '"original": lambda rows, cols: max(1.0, rows / cols) ** 0.5,',
            '"original": lambda rows, cols: max(1.0, cols / rows) ** 0.5,',
            "wide matrices learn too fast",
        ),
        (
            "outlier-columns",
            "return ~(x.abs().amax(0).float() < threshold) if len(x) else x.new_zeros(x.shape[1], dtype=torch.bool)",
            "return ~(x.abs().amin(0).float() < threshold) if len(x) else x.new_zeros(x.shape[1], dtype=torch.bool)",
            "columns with single outliers are cast to int8",
        ),
        (
            "conv1d",
            "return Shape(columns, rows, True) if is_transposed else Shape(rows, columns)",
            "return Shape(rows, columns, True) if is_transposed else Shape(rows, columns)",
            "a Conv1D is timed as its transpose",
        ),
        (
            "kept-axis",
            "if len(cut) > 1 or not tensor.placements[cut[0]].is_shard(0):",
            "if len(cut) > 1:",
            "tensors that are sharded by columns have wrong fingerprints",
        ),
    ),
    *_faults(
        "lost field of a resume",
        (
            "carried-audit",
            "return {**saved_audit(optimizer), **carried(optimizer, model), **own}",
            "return {**carried(optimizer, model), **own}",
            "a framework's resume forgets the audit",
        ),
        (
            "wall-clock",
            '"seconds": self.seconds,\n            "audit_total"',
            '"seconds": 0.0,\n            "audit_total"',
            "a resumed run forgets how long it took",
        ),
        (
            "amax-history",
            'tensors |= {f"matmul.{name}": history for name, history in self.linears.histories().items()}',
            "pass",
            "a resumed run begins its delayed scales anew",
        ),
        (
            "loss-scaler",
            'state["loss_scaler"] = self.optimizer.loss_scaler.state_dict()',
            "pass",
            "a resumed run begins with the first loss scale",
        ),
        (
            "audit-window",
            "self.alarmed[parameter] = read(rows.unbind(0)).stalls",
            "self.alarmed[parameter] = False",
            "each resume raises the same alarm again",
        ),
        (
            "accumulator-step",
            "session.accumulator.step = session.step",
            "pass",
            "micro-batches of a resumed run get other random bits",
        ),
        (
            "carried",
            'if linears is not None and "matmul_step" in state:',
            "if False:",
            "casts of a loop that goes on get the random bits of its first steps",
        ),
        ("loss-scale-lives", '"lives": lives,', '"lives": state["lives"],', "the scaler's patience never runs out"),
    ),
    *_faults(
        "inverted condition",
        (
            "restart",
            "if launching.is_restart() and launching.is_finished(folder):",
            "if launching.is_restart() and not launching.is_finished(folder):",
            "ranks that start anew end at once, and finished runs are trained again",
        ),
        (
            "override-order",
            "matches = (o.compute for o in reversed(self.overrides) if o.compute is not None and o.matches(name))",
            "matches = (o.compute for o in self.overrides if o.compute is not None and o.matches(name))",
            "of two patterns of a recipe the first wins",
        ),
        (
            "lightning-resume",
            "goes_on = trainer.global_step > 0",
            "goes_on = trainer.global_step == 0",
            "each run of Lightning goes on in the last one's folder",
        ),
        (
            "slow-format",
            "return not multiplies(format) and format not in _cared_for",
            "return multiplies(format) and format not in _cared_for",
            "slow matmuls are not told of",
        ),
        (
            "nesterov",
            "return decay, momentum, gain, float(nesterov), momentum if nesterov else 1.0, rate",
            "return decay, momentum, gain, float(not nesterov), momentum if nesterov else 1.0, rate",
            "SGD with momentum adds the gradient twice",
        ),
        (
            "stays-gathered",
            "return layout.zero < 3 or layout.shard == 1",
            "return layout.zero >= 3 or layout.shard == 1",
            "casts of weights are counted for the wrong layouts",
        ),
        ("decayed", "if decayed else 0.0", "if not decayed else 0.0", "biases decay and matrices do not"),
        (
            "all-gather-switch",
            "if path.has_adding_switch and path.nodes == 1:",
            "if path.has_adding_switch and path.nodes > 1:",
            "switches add between nodes, and not within",
        ),
        (
            "tied-head",
            "head = 0 if self.tie_embeddings else self.vocab_size * self.hidden_size",
            "head = self.vocab_size * self.hidden_size if self.tie_embeddings else 0",
            "tied models have two tables",
        ),
        (
            "forward-hook",
            "if not is_sampled(module):",
            "if is_sampled(module):",
            "gauges are measured in all steps but those asked for",
        ),
        (
            "own-weights",
            "if each.rate > 0 and _is_normalized(each) and _keeps_nothing(each):",
            "if each.rate > 0 and _is_normalized(each) and not _keeps_nothing(each):",
            "ng.check warns of the wrong optimizers",
        ),
        (
            "stochastic-share",
            "if not reading.stalls or (reading.lost_fraction == 1 and is_stochastic(storage)):",
            "if not reading.stalls or (reading.lost_fraction == 1 and not is_stochastic(storage)):",
            "stochastic storages raise alarms, dead ones do not",
        ),
        (
            "saturate",
            "if saturate or not row.nans:",
            "if not saturate or not row.nans:",
            "round_to saturates where it should overflow",
        ),
        (
            "mx-scale",
            'up=unbiased or cast.scale == "power-of-two")',
            'up=not unbiased or cast.scale == "power-of-two")',
            "mxfp8 scales are not the standard's",
        ),
    ),
    *_faults(
        "lost rounding or bound",
        (
            "loss-sum",
            "self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()",
            "self._loss = loss.detach()",
            "the loss of the last micro-batch stands for the step's",
        ),
        (
            "near-name",
            "near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)",
            "near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.99)",
            "no misspelt name is recognised",
        ),
        (
            "fsdp-dtype",
            "summed: torch.dtype = policy.reduce_dtype or computed",
            "summed: torch.dtype = computed",
            "gradients that FSDP sums in float32 are taken for bfloat16",
        ),
        (
            "found-inf",
            "skip = found_inf.to(device).reshape(()) != 0",
            "skip = torch.isinf(found_inf.to(device).reshape(()))",
            "steps that torch's scaler found infinite are taken",
        ),
        (
            "clip-eps",
            "clip = torch.ones_like(norm) if max_norm is None else (max_norm / (norm * scale + 1e-6)).clamp(max=1.0)",
            "clip = torch.ones_like(norm) if max_norm is None else (max_norm / (norm * scale + 1e-6))",
            "small gradients are scaled up to the clipping norm",
        ),
        (
            "finite-amax",
            "kept = torch.where(own.isfinite(), own, 0.0)",
            "kept = own",
            "a NaN spoils delayed scales for all of their history",
        ),
        (
            "window-end",
            "step = (magnitude.clamp(max=_last_step(code) << dropped) + addend) >> dropped",
            "step = (magnitude + addend) >> dropped",
            "what is too large for a code wraps around",
        ),
        ("half-a-part", "+ 2.0**-17,\n    )", ",\n    )", "uniform numbers have a mean below one half"),
        (
            "ceiling",
            "raised = (scale * self.growth_factor).clamp(max=self.ceiling)",
            "raised = scale * self.growth_factor",
            "the loss scale grows without end",
        ),
        (
            "eps-zero",
            'eps = max(float(group.get("adam_eps", group["eps"])), TINY)',
            'eps = float(group.get("adam_eps", group["eps"]))',
            "eps = 0 and a zero gradient give NaN",
        ),
        (
            "escape",
            'return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("%{", "%&#123;")',
            'return text.replace("&", "&amp;").replace(">", "&gt;").replace("%{", "%&#123;")',
            "a run's name is markup in a figure",
        ),
    ),
]
