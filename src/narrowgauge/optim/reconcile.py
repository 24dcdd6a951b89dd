"""Which state belongs to each parameter of an optimizer, and what has happened to a parameter since its state was last used.

A parameter gets its :class:`~narrowgauge.optim.state.ParameterState` at its first step, or when a state is loaded or
written. From then on others may change the parameter, its options or its place in the groups. Before each use,
:func:`reconcile` finds out what has happened; the :class:`Registry` does what follows from it.

==========================================================  ==============================================================
what has happened to the parameter                          what is done
==========================================================  ==============================================================
it has no state yet                                         one is made
it has no gradient                                          it is not stepped
... and another has taken its place in the model            refused, in a first step (:func:`check_in_use`)
its gradient is sparse, or not in its format and size       refused
its group names another storage                             refused
its options need more states                                they are added, the others stay bit for bit
its options need states of other shapes, or another rule    refused
its shape or dtype is another                               refused
it lies on another device                                   its states follow
it was written to, or moved in memory                       its value is adopted where its bits have changed
it was written to through ``.data``                         adopted at the next audited step, whose checksum shows it
another parameter stands at its place in the groups         the states pass to that one (:meth:`Registry.follow`)
it is in no group any more                                  its state is dropped at the next step
==========================================================  ==============================================================

*Written to.* A user may load a checkpoint, apply a mask or swap in an average at any time. What is stored with the weight
then belongs to a value that is gone. A float32 master is compared with the visible weight in every step, in the kernel, and
is replaced element by element. A tail does not say which weight it belongs to, so a
:class:`~narrowgauge.optim.state.Snapshot` of the parameter is taken after each step: its address and its version counter
(``_version``), which every write but one through ``.data`` raises, and for audited steps a checksum. If these are
unchanged, so is the weight. If not, and there is a copy of the visible weight, elements with unchanged bits keep their
tails: a bucket has such a copy, and a parameter that is modified repeatedly gets one. Without a copy all tails of the
parameter are discarded.

*Moved or replaced.* A framework may place a model on a device later (``model.to`` gives each parameter other memory), or
shard it later: Accelerate's FSDP2 puts the shard of each parameter at its place in the param groups. Torch's optimizers
have no states by then. Ours has the bits of the weights that the visible ones cut, since :func:`narrowgauge.prepare`. A
state passes to another parameter only at the same place of the groups, with the same shape, and where every visible bit
that this rank holds is the same; else the new one starts afresh.

Source: Accelerate 1.15, ``fsdp2_switch_optimizer_parameters`` and ``AcceleratedOptimizer._switch_parameters``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import _torch
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.checksums import fingerprint
from narrowgauge.numerics.devices import require_float64
from narrowgauge.numerics.fusion import COMPILE_ELEMENTS
from narrowgauge.numerics.shards import is_sharded, local_of, own_part
from narrowgauge.optim import codec
from narrowgauge.optim.audit import audited_parts
from narrowgauge.optim.kernel import Kernel, MatrixKernel, StepKernel
from narrowgauge.optim.replicated_state import ReplicatedState
from narrowgauge.optim.rules.elementwise import ADAMW, Rule
from narrowgauge.optim.rules.matrix import MatrixRule, shapes_of_states, states_beside
from narrowgauge.optim.state import Bucket, ParameterState, Snapshot, make_states, without
from narrowgauge.optim.validation import check_visible, gradient_of, known_row
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.storages import Storage, for_vectors

Group = dict[str, Any]
Place = tuple[int, int]
"""The number of a group and of a parameter in it."""
OFTEN = 2
"""Modifications after which a copy of the visible weight is stored, so that the next one is adopted element by element."""


# ── what has happened ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Differences:
    """What has happened to parameters, by what is to be done about it.

    Args:
        new: they get a state.
        wider: the names of all states that each must have, since its options need more than it has.
        modified: their present values are adopted.
    """

    new: list[Tensor] = field(default_factory=list)
    wider: dict[Tensor, set[str]] = field(default_factory=dict)
    modified: list[ParameterState] = field(default_factory=list)


def reconcile(
    registry: Registry, parameters: Iterable[Tensor], group: Group | None = None, audit_every: int = 0
) -> Differences:
    """Find out what has happened to parameters since their states were last used.

    Args:
        group: the options that they are about to be stepped under; ``None`` where their states are only read. Then a state
            that was just loaded is left alone: the weight that belongs to it may be loaded later.
        audit_every: also find writes that raise no version counter, where the next step is audited.
    Raises:
        RecipeError: a change that the table above says is refused.

    Cost: some microseconds a parameter; one wait for a device where a step is audited.
    """
    found, quiet = Differences(), []
    states_change = group is not None and registry.states_change
    for parameter in parameters:
        state = registry.states.get(parameter)
        if group is not None:
            gradient_of(parameter)
            if state is None:
                found.new.append(parameter)
                continue
            if state.requested != group["storage"]:
                _refuse_storage(group["storage"], state.requested)
            if states_change and (wanted := _states_to_add(registry, group, parameter, state)):
                found.wider[parameter] = wanted
        elif state is None or state.snapshot is None or state.snapshot.version is None:
            continue
        if not is_unmodified(state):
            check_fits(state, registry)
            found.modified.append(state)
        elif audit_every:
            quiet.append(state)
    if quiet:
        found.modified += modified_silently(quiet, audit_every)
    return found


def _states_to_add(registry: Registry, group: Group, parameter: Tensor, state: ParameterState) -> set[str]:
    """The names of all states that a parameter needs under its group's options; none where it has them."""
    own = state.shapes_of_states
    rule = registry.rule_of(group, parameter, own)
    wanted = shapes_of_states(rule, parameter.shape, group)
    if isinstance(registry.rule, MatrixRule):
        _check_rule_stands(state.kernel.rule.name, own, rule.name, wanted)
    return {*wanted, *own} if wanted.keys() - own.keys() else set()


def _check_rule_stands(rule: str, own: Mapping[str, Any], new_rule: str, wanted: Mapping[str, Any]) -> None:
    """Refuse options under which a matrix is stepped by another rule, or has states of other shapes."""
    advice = "Set it before the first step, or build a new optimizer."
    if new_rule != rule:
        raise RecipeError(f"rule '{new_rule}' was set for a parameter whose states are those of '{rule}'.", advice)
    for name in wanted.keys() & own.keys():
        if tuple(wanted[name]) != tuple(own[name]):
            raise RecipeError(
                f"an option was set under which '{name}' of rule '{rule}' has the shape {tuple(wanted[name])}, and it was "
                f"made with {tuple(own[name])}.",
                advice,
            )


def _refuse_storage(asked: str, made: str) -> None:
    raise RecipeError(
        f"a group's storage was changed to '{asked}', and its states are stored in '{made}'.",
        "Build a new optimizer with that storage, and take the state over with ng.convert, or clear optimizer.state.",
    )


def check_fits(state: ParameterState, registry: Registry) -> None:
    """Refuse a parameter whose shape or dtype is not what its states were made for."""
    snapshot, weight = state.snapshot, state.parameter
    if snapshot is None or (weight.shape, weight.dtype) == (snapshot.shape, snapshot.dtype):
        return
    name = registry.parameter_names().get(state.owner, "param")
    device = next((kept.device for kept in state.tensors()), weight.device)
    now, then = (_described(*kind) for kind in ((weight.dtype, weight.shape), (snapshot.dtype, snapshot.shape)))
    raise RecipeError(
        f"parameter '{name}' is {now} on {weight.device} now, and its states were made for {then} on {device}.",
        "Change a model before its optimizer is built: build a new one for it as it is, and load or ng.convert what was "
        "saved from before.",
    )


def _described(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"


def check_in_use(names: Mapping[Tensor, str], model: nn.Module | None) -> None:
    """Refuse parameters that never get a gradient, since others have taken their places in the model."""
    held: dict[str, Tensor] = {}
    ours: set[int] = set()
    if model is not None:
        held = {_torch.plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
        # FSDP2's own stand in the modules, or what it has gathered of them.
        of_fsdp = [
            p for _, g in _torch.fsdp_groups(model) for p in (*_torch.fsdp_parameters(g), *_torch.fsdp_gathered(g))
        ]
        ours = {id(parameter) for parameter in (*held.values(), *of_fsdp)}
    for parameter, name in names.items():
        if not parameter.requires_grad or parameter.grad is not None:
            continue
        if _torch.was_taken_by_fsdp(parameter) or (name in held and id(parameter) not in ours):
            raise RecipeError(
                f"parameter '{name}' of the optimizer has no gradient and never gets one: another has taken its place in the "
                "model.",
                "Change the model first (fully_shard, resize_token_embeddings), and make the optimizer or call "
                "narrowgauge.prepare then; model.reshard() puts back what FSDP2 has gathered in a forward pass.",
            )


# ── the states of all parameters ────────────────────────────────────────────────────────────────────────────────────────


class Registry:
    """The states of an optimizer's parameters, and what steps them.

    Args:
        storages: those that its groups name, by name; more may be added.
        compile: whether to compile kernels; ``None`` decides by size.
        groups: returns the optimizer's param groups.
        names: of parameters whose groups give none; those of parameters that have left the groups are removed.
        look_up_names: fills ``names`` for parameters that have joined the groups.
    """

    def __init__(
        self,
        rule: Rule | MatrixRule,
        storages: dict[str, Storage],
        compile: bool | None,
        groups: Callable[[], list[Group]],
        names: dict[Tensor, str],
        look_up_names: Callable[[], object] = lambda: None,
    ) -> None:
        self.rule, self.storages, self.compile, self._groups, self._names = rule, storages, compile, groups, names
        self._look_up_names = look_up_names
        self.states: dict[Tensor, ParameterState] = {}
        self.buckets: list[Bucket] = []
        self.kernels: dict[tuple[str, Storage], Kernel] = {}
        self._places: dict[Tensor, Place] = {}
        # The groups' parameters when they were last read, by id, and those that had left them with a state by then.
        self._listed: list[list[int]] = []
        self._left: set[Tensor] = set()
        self._aligned: list[tuple[list[int], list[str]]] = []
        self._warned = False

    @property
    def states_change(self) -> bool:
        """Whether a change of options may change which states are needed."""
        return isinstance(self.rule, MatrixRule) or self.rule.reduces is not None

    def worth_compiling(self, num_elements: int) -> bool:
        return self.compile if self.compile is not None else num_elements >= COMPILE_ELEMENTS

    # ── what belongs to a parameter ─────────────────────────────────────────────────────────────────────────────────

    def parameters(self) -> list[Tensor]:
        """All parameters, in the order of ``state_dict()``."""
        return [p for group in self._groups() for p in group["params"]]

    def parameter_names(self) -> dict[Tensor, str]:
        """The name of each parameter: its group's, else its model's, else ``"param 0"``, ``"param 1"`` …"""
        names: dict[Tensor, str] = {}
        self.align_names()
        for group in self._groups():
            given = group.get("param_names") or [None] * len(group["params"])
            for parameter, name in zip(group["params"], given, strict=True):
                names[parameter] = name or self._names.get(parameter) or f"param {len(names)}"
        return names

    def align_names(self) -> None:
        """Let each group's ``param_names`` be those of its parameters, after parameters were removed, moved or replaced.

        Code that changes ``params`` may not know the list beside it. A parameter that took another's place takes its name.
        """
        groups = [group for group in self._groups() if "param_names" in group]
        now = [([id(p) for p in group["params"]], group["param_names"]) for group in groups]
        if now == self._aligned:
            return
        known = {key: name for keys, names in self._aligned for key, name in zip(keys, names, strict=True)}
        present = {key for keys, _ in now for key in keys}
        taken = {name for key, name in known.items() if key in present}
        before = [names for _, names in self._aligned]
        for group, (keys, names) in zip(groups, now, strict=True):
            if len(names) == len(keys) and names not in before:
                continue  # new ones
            free = [name if name not in taken else None for name in names] if len(names) == len(keys) else []
            free += [None] * (len(keys) - len(free))
            group["param_names"] = [
                known.get(id(p)) or other or self._names.get(p) or f"param {index}"
                for index, (p, other) in enumerate(zip(group["params"], free, strict=True))
            ]
        self._aligned = [([id(p) for p in group["params"]], list(group["param_names"])) for group in groups]

    def group_of(self, parameter: object) -> Group | None:
        """The param group of a parameter; ``None`` for anything else.

        Cost: none where the groups are as they were when states were last made.
        """
        groups = self._groups()
        if isinstance(parameter, Tensor) and parameter in self._places and self._is_at(parameter, groups):
            return groups[self._places[parameter][0]]
        return next((g for g in groups if any(parameter is p for p in g["params"])), None)

    def _is_at(self, parameter: Tensor, groups: Sequence[Group]) -> bool:
        """Whether a parameter still has the place that it had when the groups were last read."""
        number, index = self._places.get(parameter, (0, 0))
        members = groups[number]["params"] if number < len(groups) else ()
        return index < len(members) and members[index] is parameter

    def storage_of(self, group: Group, parameter: Tensor) -> Storage:
        row = known_row(group["storage"], self.storages)
        return for_vectors(row) if parameter.ndim < 2 else row

    def rule_of(self, group: Group, parameter: Tensor, states: Collection[str] = ()) -> Rule | MatrixRule:
        """The rule that steps a parameter, which has states of these names already, under its group's options.

        Where the optimizer's rule is a matrix rule: AdamW for what is no matrix, and for groups that request it.
        """
        plain = parameter.ndim < 2 or group.get("rule") == ADAMW.name
        rule = ADAMW if isinstance(self.rule, MatrixRule) and plain else self.rule
        return rule if isinstance(rule, MatrixRule) else rule.under(group, states)

    # ── states, fit for use ─────────────────────────────────────────────────────────────────────────────────────────

    def for_step(self, group: Group, parameters: Sequence[Tensor], audit_every: int) -> list[ParameterState]:
        """The states of parameters that are about to be stepped: made where there are none, else reconciled."""
        found = reconcile(self, parameters, group, audit_every)
        if found.modified:
            self.adopt(found.modified)
        if found.wider:
            self._widen(group, found.wider)
        if found.new:
            self.make(group, found.new)
        return [self.states[p] for p in parameters]

    def for_reading(self, parameters: Iterable[Tensor]) -> None:
        """Bring the states of parameters up to their present weights."""
        if modified := reconcile(self, parameters).modified:
            self.adopt(modified)

    def get(self, parameter: Tensor) -> ParameterState | None:
        """The state of a parameter, with all writes to it adopted; ``None`` where there is none."""
        self.follow()
        if parameter in self.states:
            self.for_reading([parameter])
        return self.states.get(parameter)

    def with_states(self) -> dict[Tensor, None]:
        """The parameters that have a state, in the order in which they got it."""
        self.follow()
        known = set(self.parameters())
        return {parameter: None for parameter in self.states if parameter in known}

    def begin(self, parameter: Tensor, name: str) -> ParameterState:
        """Make the state of a parameter, with one called ``name`` if the rule has it."""
        group = self.group_of(parameter)
        assert group is not None
        with torch.no_grad():
            self.make(group, [parameter], {parameter: (name,)})
        return self.states[parameter]

    def make(
        self, group: Group, parameters: Iterable[Tensor], names: Mapping[Tensor, Collection[str]] | None = None
    ) -> None:
        """Make states for those parameters of a group that have none; ``names``: of states about to be loaded."""
        alike: dict[tuple[str, Storage, torch.device], list[Tensor]] = {}
        rules: dict[str, Rule | MatrixRule] = {}
        extras: dict[Tensor, dict[str, ReplicatedState]] = {}
        for parameter in parameters:
            if parameter in self.states:
                continue
            row = self.storage_of(group, parameter)
            require_float64([parameter])
            check_visible(parameter, row)
            rule = self.rule_of(group, parameter, (names or {}).get(parameter, ()))
            if isinstance(rule, MatrixRule):
                kept = rule.states(tuple(parameter.shape), group)
                extras[parameter] = {
                    name: ReplicatedState.zeros(name, k.shape, k.role, row, parameter.device)
                    for name, k in kept.items()
                    if not k.beside
                }
                row = row.keeping(states_beside(kept))
            else:
                row = row.keeping(rule.kept)
            rules[rule.name] = rule
            alike.setdefault((rule.name, row, parameter.device), []).append(parameter)
        if alike:
            self._places = places_of(self._groups()) | {p: self._places[p] for p in self.states if p in self._places}
        for (name, row, _), members in alike.items():
            states, buckets = make_states(members, row, self._kernel(rules[name], row))
            self.buckets += buckets
            for state in states:
                state.extras = extras.get(state.owner, {})
                if row.master:
                    state.adopt(state.parameter)
                state.snapshot = snapshot_of(state)
                state.requested = group["storage"]
                self.states[state.owner] = state

    def _kernel(self, rule: Rule | MatrixRule, storage: Storage) -> Kernel:
        key = rule.name, storage
        if key not in self.kernels:
            if isinstance(rule, MatrixRule):
                total = sum(p.numel() for g in self._groups() for p in g["params"])
                self.kernels[key] = MatrixKernel(rule, storage, compile=self.worth_compiling(total))
            else:
                rows = [(self.storage_of(g, p), p) for g in self._groups() for p in g["params"]]
                total = sum(p.numel() for row, p in rows if row.keeping(rule.kept) == storage)
                self.kernels[key] = StepKernel(rule, storage, compile=self.worth_compiling(total))
        return self.kernels[key]

    def _widen(self, group: Group, wider: Mapping[Tensor, set[str]]) -> None:
        old = {parameter: self.states.pop(parameter) for parameter in wider}
        self.buckets = [b for b in self.buckets if not any(member.owner in old for member in b.members)]
        self.make(group, wider, wider)
        for parameter, state in old.items():
            self.states[parameter].inherit(state)

    def remove(self, parameters: Iterable[Tensor]) -> set[ParameterState]:
        """Remove the states of parameters, which start again from their visible weights; returns these states."""
        removed = [parameter for parameter in parameters if parameter in self.states]
        gone = {self.states.pop(parameter) for parameter in removed}
        for parameter in self._left.intersection(removed):  # nothing holds it any more
            self._left.remove(parameter)
            self._places.pop(parameter, None)
        buckets, self.buckets = self.buckets, []
        for bucket in buckets:
            touched = any(member in gone for member in bucket.members)
            self.buckets += without(bucket, gone) if touched else [bucket]
        return gone

    def adopt(self, states: Sequence[ParameterState]) -> None:
        """Adopt the present weights of parameters that may have been modified; warn the first time one was."""
        moved = self._bring_states()
        states = [state for state in states if state not in moved or not is_unmodified(state)]
        for state in states:
            check_fits(state, self)
        if found := [state.owner for state in states if adopt_modified(state)]:
            self._warn_of(found)

    def _warn_of(self, modified: Sequence[Tensor]) -> None:
        if self._warned:
            return
        self._warned = True
        name = self.parameter_names().get(modified[0], "param")
        more = f" and of {len(modified) - 1} more parameters" if len(modified) > 1 else ""
        warnings.warn(
            f"weights of '{name}'{more} were modified outside this optimizer: it adopts them and discards the tails "
            "that were stored with them. This warning appears once.",
            stacklevel=3,
        )

    # ── parameters that were moved, replaced or removed ─────────────────────────────────────────────────────────────

    def _bring_states(self) -> set[ParameterState]:
        """Move states to the devices that their parameters have been moved to; returns these."""
        moved = {state for state in self.states.values() if is_elsewhere(state)}
        if not moved:
            return moved
        require_float64(state.parameter for state in moved)
        alone = set(moved)
        buckets, self.buckets = self.buckets, []
        for bucket in buckets:
            leaving = [member for member in bucket.members if member in moved]
            staying = [member for member in bucket.members if member not in moved]
            self.buckets += [bucket] if not leaving else [*without(bucket, staying), *without(bucket, leaving)]
            for member in leaving:
                alone.remove(member)
                settle(member)
        for state in alone:
            device = state.parameter.device
            for kept in (state.words, state.bounds, *(extra.tensors for extra in state.extras.values())):
                kept.update({name: tensor.to(device) for name, tensor in kept.items()})
            settle(state)
        return moved

    def follow(self) -> None:
        """Notice parameters that others have removed from the groups, moved or replaced.

        The states of a replaced one pass to the parameter at its place. Those of a removed one stay until :meth:`orphans` are
        removed; it is not stepped.

        Raises:
            RecipeError: a parameter was replaced by one in another format.

        Cost: a comparison of the parameters' ids, where nothing was changed.
        """
        groups = self._groups()
        listed = [[id(p) for p in group["params"]] for group in groups]
        if listed == self._listed:
            return
        self._look_up_names()
        self.align_names()
        known = places_of(groups)
        gone = {p: state for p, state in self.states.items() if p not in known}
        heirs = {p: heir_of(state, self._places.get(p), groups) for p, state in gone.items()}
        # A parameter that was there before has only moved up.
        replaced = {p: heir for p, heir in heirs.items() if heir is not None and heir not in self._places}
        self._pass_on(gone, replaced)
        left = {p: self._places[p] for p in gone.keys() - replaced.keys() if p in self._places}
        self._listed, self._left, self._places = listed, set(gone) - set(replaced), known | left
        for parameter in self._names.keys() - known.keys():
            del self._names[parameter]

    def _pass_on(self, gone: Mapping[Tensor, ParameterState], replaced: Mapping[Tensor, Tensor]) -> None:
        if not replaced:
            return
        self._names.update({heir: self._names[old] for old, heir in replaced.items() if old in self._names})
        names = self.parameter_names()
        for old, heir in replaced.items():
            check_heir(gone[old], heir, names.get(heir, "param"))
        for group in self._groups():
            members = set(group["params"])
            self.make(group, [heir for heir in replaced.values() if heir in members])
        lost = [names[heir] for old, heir in replaced.items() if not pass_on(gone[old], self.states[heir])]
        self.remove(replaced)
        if lost:
            warnings.warn(
                f"'{lost[0]}' was replaced by a parameter with other values: its state starts anew from them.",
                stacklevel=4,
            )

    def orphans(self) -> list[Tensor]:
        """Parameters that have a state and no param group any more."""
        self.follow()
        return [parameter for parameter in self._left if parameter in self.states]


def places_of(groups: Sequence[dict[str, Any]]) -> dict[Tensor, Place]:
    return {p: (number, index) for number, group in enumerate(groups) for index, p in enumerate(group["params"])}


def heir_of(state: ParameterState, place: Place | None, groups: Sequence[dict[str, Any]]) -> Tensor | None:
    """The parameter that has taken the place of another of its shape; ``None`` where there is none."""
    if place is None or is_sharded(state.owner) or place[0] >= len(groups):
        return None
    members = groups[place[0]]["params"]
    heir = members[place[1]] if place[1] < len(members) else None
    return heir if heir is not None and heir is not state.owner and heir.shape == state.owner.shape else None


def check_heir(state: ParameterState, heir: Tensor, name: str) -> None:
    """Refuse a parameter in another format than the one whose place it took."""
    wanted = getattr(torch, state.storage.visible)
    if heir.dtype is not wanted:
        kind, given = (dtype_name(dtype) for dtype in (wanted, heir.dtype))
        raise RecipeError(
            f"parameter '{name}' was replaced by a {given} one, and its storage '{state.storage.name}' holds {kind} weights.",
            "Accelerate's FSDP2 does so unless mixed_precision='no': leave it so, since the recipe says what to compute in.",
        )


def pass_on(old: ParameterState, new: ParameterState) -> bool:
    """Pass a state to the parameter that took the place of its own, where that has the same visible bits; returns whether it did.

    ``old`` belongs to a whole parameter; ``new``, all zero, to the same in other memory, or to this rank's shard of it.
    """
    device = new.parameter.device
    shown = own_part(new.owner, old.owner.detach().to(device))
    if shown.dtype is not new.parameter.dtype or not torch.equal(shown, new.parameter.detach()):
        return False
    values, whole = old.in_parameter_order(), old.tensors_of_extras()
    new.take({n: v.to(device) if n in whole else own_part(new.owner, v.to(device)) for n, v in values.items()})
    new.step, new.begun, new.notes = old.step, old.begun, old.notes
    snapshot_adopted(new)
    return True


def is_elsewhere(state: ParameterState) -> bool:
    """Whether the states of a parameter are on another device than it is."""
    kept = next(iter(state.tensors()), None)
    return kept is not None and kept.device != state.parameter.device


def settle(state: ParameterState) -> None:
    """Forget what a state knows of the memory that it has left.

    Any write except through ``.data`` raises the version counter, so bits whose counter is unchanged have only been moved.
    """
    state.__dict__.pop("plane_words", None)
    if state.last_visible is not None:
        state.last_visible = state.last_visible.to(state.parameter.device)
    before, now = state.snapshot, snapshot_of(state)
    if before is not None and before.version == now.version:
        now.fingerprint, now.num_writes = before.fingerprint, before.num_writes
        state.snapshot = now


# ── weights that were modified outside the optimizer ────────────────────────────────────────────────────────────────────


def snapshot_of(state: ParameterState, *, bound: bool = True) -> Snapshot:
    """A snapshot of a parameter now; with ``bound=False`` the value that it has at its next step belongs to its states."""
    weight = state.parameter
    version = _version(state) if bound else None
    return Snapshot(weight.detach(), weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, version)


def _version(state: ParameterState) -> int:
    version: int = state.owner._version
    return version if state.parameter is state.owner else version + state.parameter._version


def has_tail(state: ParameterState) -> bool:
    """Whether the stored weight has a part that does not say which visible weight it belongs to."""
    return bool(state.storage.beside) and not state.storage.master


def is_unmodified(state: ParameterState) -> bool:
    """Whether a parameter was neither moved, replaced nor (except through ``.data``) written to since its last step."""
    weight, snapshot, owner = state.parameter, state.snapshot, state.owner
    if weight is owner:
        version: int = owner._version
    else:
        weight = state.parameter = local_of(owner)  # the local tensor of a DTensor may have been replaced
        version = _version(state)
    return (
        snapshot is not None
        and version == snapshot.version
        and weight.data_ptr() == snapshot.address
        and weight.shape == snapshot.shape
        and weight.stride() == snapshot.stride
        and weight.dtype is snapshot.dtype
    )


def snapshot_after_step(states: Sequence[ParameterState], audit_every: int) -> None:
    for state in states:
        snapshot = state.snapshot
        assert snapshot is not None
        weight = state.parameter
        snapshot.version = weight._version if weight is state.owner else _version(state)
        snapshot.fingerprint = None
        if state.owns_copy:
            assert state.last_visible is not None
            state.last_visible.copy_(state.parameter.detach())
        if audit_every and (snapshot.checksum is not None or (state.step + 1) % audit_every == 0):
            audited = (state.step + 1) % audit_every == 0 and state.last_visible is None and has_tail(state)
            snapshot.checksum = audited_checksum(state, (state.step + 1) // audit_every) if audited else None


def modified_silently(states: Sequence[ParameterState], audit_every: int) -> list[ParameterState]:
    """The states whose next step is audited and whose bits have changed although their version counters have not."""
    found = []
    for state in states:
        if (state.step + 1) % audit_every == 0 and has_tail(state) and state.snapshot is not None:
            if state.last_visible is not None:
                found.append((state, (_bits(state.last_visible) != _bits(state.parameter.detach())).any()))
            elif (before := state.snapshot.checksum) is not None:
                now = audited_checksum(state, (state.step + 1) // audit_every)
                found.append((state, before != (before + 1 if now is None else now)))
    flags = torch.stack([flag for _, flag in found]).tolist() if found else []  # one wait for a device, not many
    return [state for (state, _), flag in zip(found, flags, strict=True) if flag]


def snapshot_adopted(state: ParameterState) -> None:
    """Take a snapshot of a parameter whose value was just stored; a fingerprint finds any write before the first step."""
    state.snapshot = snapshot_of(state)
    state.snapshot.fingerprint = fingerprint(state.parameter) if has_tail(state) else None


def audited_checksum(state: ParameterState, turn: int) -> Tensor | None:
    """Checksum of the words that audit number ``turn`` covers, int64 0-d; ``None`` where they cannot be read as words."""
    words = state.weight_words()
    if words is None or not words[0].numel():
        return None
    row = words[0][0].numel()
    ((part, _),) = [p for p in audited_parts(words[0].shape[0], turn, row) if p[1]]
    return torch.stack([half[part].sum(dtype=torch.int64) for half in words]).sum()


def adopt_modified(state: ParameterState) -> int:
    """Adopt the value of a parameter that was modified; returns how many elements changed (all of them where that is unknown)."""
    weight = state.parameter.detach()
    before, state.snapshot = state.snapshot, snapshot_of(state)
    if before is None or before.version is None or not state.storage.beside:
        return 0
    state.snapshot.num_writes = before.num_writes
    if state.storage.master:
        return int(state.outdated().sum())  # the next step adopts them
    if before.fingerprint is not None and before.fingerprint == fingerprint(weight):
        state.snapshot.fingerprint = before.fingerprint
        return 0
    changed = torch.ones_like(weight, dtype=torch.bool)
    if state.last_visible is not None:
        changed = (_bits(state.last_visible) != _bits(weight)).view(weight.shape)
    count = int(changed.sum())
    if count:
        state.discard_tails(changed)
        state.snapshot.num_writes += 1
    if state.snapshot.num_writes >= OFTEN and state.last_visible is None:
        state.last_visible, state.owns_copy = weight.clone(memory_format=torch.contiguous_format), True
    return count


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(codec.INTEGER[8 * values.element_size()])
