"""The states of an optimizer's parameters, and what may have happened to a parameter since its last step.

A parameter gets its :class:`~narrowgauge.optim.state.ParameterState` at its first step, or when a state is loaded or
written. The registry makes it, finds it again, and checks before each use that the parameter still is what its states were
made for.

*Moved or replaced.* A framework may place a model on a device later (``model.to`` gives each parameter other memory), or
shard it later: Accelerate's FSDP2 puts the shard of each parameter at its place in the param groups. Torch's optimizers
have no states by then. Ours has the bits of the weights that the visible ones cut, since :func:`narrowgauge.prepare`. A
parameter that follows has the bits that it had: a state passes to another parameter only at the same place of the groups,
with the same shape, and where every visible bit that this rank holds is the same; else the new one starts afresh.

*Written to.* A user may load a checkpoint, apply a mask or swap in an average at any time. What is stored with the weight
then belongs to a value that is gone. A float32 master is compared with the visible weight in every step, in the kernel, and
is replaced element by element. A tail does not say which weight it belongs to, so a
:class:`~narrowgauge.optim.state.Snapshot` of the parameter is taken after each step: its address and its version counter
(``_version``), which every write but one through ``.data`` raises, and for audited steps a checksum. If these are
unchanged, so is the weight. If not, and a copy of the visible weight is at hand, elements with unchanged bits keep their
tails: a bucket has such a copy, and a parameter that is modified repeatedly gets one. Without a copy all tails of the
parameter are discarded.

Source: Accelerate 1.15, ``fsdp2_switch_optimizer_parameters`` and ``AcceleratedOptimizer._switch_parameters``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.shards import is_sharded, local_of, own_part
from narrowgauge.numerics.summation import fingerprint
from narrowgauge.optim import codec
from narrowgauge.optim.audit import audited_parts
from narrowgauge.optim.kernel import Kernel, MatrixKernel, StepKernel
from narrowgauge.optim.rules.elementwise import ADAMW, Rule
from narrowgauge.optim.rules.matrix import MatrixRule, shapes_of_states
from narrowgauge.optim.state import Bucket, ParameterState, Snapshot, make_stores, without
from narrowgauge.optim.validation import check_unchanged, check_visible, known_row
from narrowgauge.spec.storages import Storage, for_vectors

Group = dict[str, Any]
WORTH_COMPILING = 1 << 18
"""Elements of one storage from which compiling its kernel pays within a short run."""


class Registry:
    """The stores of an optimizer's parameters.

    Args:
        rule: the optimizer's rule.
        storages: the storages that its groups name, by name; more may be added.
        compile: whether to compile kernels; ``None`` decides by size.
        groups: returns the optimizer's param groups.
        names: names of parameters whose groups give none; those of parameters that have left the groups are removed.
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
        self.stores: dict[Tensor, ParameterState] = {}
        self.buckets: list[Bucket] = []
        self.kernels: dict[tuple[str, Storage], Kernel] = {}
        self._places: dict[Tensor, Place] = {}
        # The groups' parameters when they were last looked at, by id, and those that had left them with a state by then.
        self._listed: list[list[int]] = []
        self._left: set[Tensor] = set()
        self._aligned: list[tuple[list[int], list[str]]] = []
        self._warned = False

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

        Others change ``params`` and know nothing of the list beside it. A parameter that took another's place takes its name.
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

    def storage_of(self, group: Group, parameter: Tensor) -> Storage:
        """How a parameter of a group is stored."""
        row = known_row(group["storage"], self.storages)
        return for_vectors(row) if parameter.ndim < 2 else row

    def rule_of(self, group: Group, parameter: Tensor, states: Collection[str] = ()) -> Rule | MatrixRule:
        """The rule that steps a parameter under its group's options, where it has states of these names already.

        Where the optimizer's rule is a matrix rule: AdamW for what is no matrix, and for groups that request it.
        """
        plain = parameter.ndim < 2 or group.get("rule") == ADAMW.name
        rule = ADAMW if isinstance(self.rule, MatrixRule) and plain else self.rule
        return rule if isinstance(rule, MatrixRule) else rule.under(group, states)

    def worth_compiling(self, num_elements: int) -> bool:
        """Whether kernels for so many elements are compiled."""
        return self.compile if self.compile is not None else num_elements >= WORTH_COMPILING

    # ── stores ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def with_states(self) -> dict[Tensor, None]:
        """The parameters that have a store, in the order in which they got it."""
        self.follow()
        known = set(self.parameters())
        return {parameter: None for parameter in self.stores if parameter in known}

    def get(self, parameter: Tensor) -> ParameterState | None:
        """The store of a parameter, with all writes to it adopted; ``None`` where there is none."""
        self.follow()
        if (store := self.stores.get(parameter)) is not None:
            self.adopt_writes([store], loaded=False)
        return store

    def begin(self, parameter: Tensor, name: str) -> ParameterState:
        """Make the store of a parameter, with a state called ``name`` if the rule has one."""
        group = self.group_of(parameter)
        assert group is not None
        with torch.no_grad():
            self.make(group, [parameter], {parameter: (name,)})
        return self.stores[parameter]

    def make(
        self, group: Group, parameters: Iterable[Tensor], states: Mapping[Tensor, Collection[str]] | None = None
    ) -> None:
        """Make stores for those parameters of a group that have none; ``states``: names of those about to be loaded."""
        alike: dict[tuple[str, Storage, torch.device], list[Tensor]] = {}
        rules: dict[str, Rule | MatrixRule] = {}
        extras: dict[Tensor, dict[str, Tensor]] = {}
        for parameter in parameters:
            if parameter in self.stores:
                continue
            row = self.storage_of(group, parameter)
            check_visible(parameter, row)
            rule = self.rule_of(group, parameter, (states or {}).get(parameter, ()))
            if isinstance(rule, MatrixRule):
                kept = rule.states(tuple(parameter.shape), group)
                row = row.keeping(tuple((name, k.role) for name, k in kept.items() if k.role is not None))
                extras[parameter] = {
                    name: torch.zeros(k.shape, dtype=torch.float32, device=parameter.device)
                    for name, k in kept.items()
                    if k.role is None
                }
            else:
                row = row.keeping(rule.kept)
            rules[rule.name] = rule
            alike.setdefault((rule.name, row, parameter.device), []).append(parameter)
        if alike:
            self._places = places_of(self._groups()) | {p: self._places[p] for p in self.stores if p in self._places}
        for (name, row, _), members in alike.items():
            stores, buckets = make_stores(members, row, self._kernel(rules[name], row))
            self.buckets += buckets
            for store in stores:
                store.extras = extras.get(store.owner, {})
                if row.master:
                    store.adopt(store.parameter)
                store.snapshot = snapshot_of(store)
                store.requested = group["storage"]
                self.stores[store.owner] = store

    def _kernel(self, rule: Rule | MatrixRule, storage: Storage) -> Kernel:
        key = rule.name, storage
        if key not in self.kernels:
            if isinstance(rule, MatrixRule):
                self.kernels[key] = MatrixKernel(rule, storage)
            else:
                rows = [(self.storage_of(g, p), p) for g in self._groups() for p in g["params"]]
                total = sum(p.numel() for row, p in rows if row.keeping(rule.kept) == storage)
                self.kernels[key] = StepKernel(rule, storage, compile=self.worth_compiling(total))
        return self.kernels[key]

    def add_states(self, group: Group, parameters: Iterable[Tensor]) -> None:
        """Add the states that changed options need; all others stay bit for bit.

        Raises:
            RecipeError: the options need states of other shapes, or another rule.
        """
        if isinstance(self.rule, Rule) and self.rule.reduces is None:
            return  # its states never change
        wider: dict[Tensor, set[str]] = {}
        for parameter in parameters:
            if (store := self.stores.get(parameter)) is not None:
                rule = self.rule_of(group, parameter, store.shapes_of_states)
                wanted = shapes_of_states(rule, parameter.shape, group)
                if isinstance(self.rule, MatrixRule):
                    check_unchanged(store.kernel.rule.name, store.shapes_of_states, rule.name, wanted)
                if wanted.keys() - store.shapes_of_states.keys():
                    wider[parameter] = {*wanted, *store.shapes_of_states}
        old = {parameter: self.stores.pop(parameter) for parameter in wider}
        self.buckets = [b for b in self.buckets if not any(member.owner in old for member in b.members)]
        self.make(group, wider, wider)
        for parameter, store in old.items():
            new = self.stores[parameter]
            new.inherit(store)
            new.snapshot = snapshot_of(store, bound=store.snapshot is None or store.snapshot.version is not None)

    def remove(self, parameters: Iterable[Tensor]) -> set[ParameterState]:
        """Remove the stores of parameters: they start again from their visible weights.

        Returns:
            The stores that were removed.
        """
        removed = [parameter for parameter in parameters if parameter in self.stores]
        gone = {self.stores.pop(parameter) for parameter in removed}
        for parameter in self._left.intersection(removed):  # nothing holds it any more
            self._left.remove(parameter)
            self._places.pop(parameter, None)
        buckets, self.buckets = self.buckets, []
        for bucket in buckets:
            touched = any(member in gone for member in bucket.members)
            self.buckets += without(bucket, gone) if touched else [bucket]
        return gone

    def follow(self) -> None:
        """Take note of parameters that others have removed from the groups, moved or replaced.

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
        gone = {p: store for p, store in self.stores.items() if p not in known}
        heirs = {p: heir_of(store, self._places.get(p), groups) for p, store in gone.items()}
        # A parameter that was there before has only moved up.
        replaced = {p: heir for p, heir in heirs.items() if heir is not None and heir not in self._places}
        self._pass_on(gone, replaced)
        left = {p: self._places[p] for p in gone.keys() - replaced.keys() if p in self._places}
        self._listed, self._left, self._places = listed, set(gone) - set(replaced), known | left
        for parameter in self._names.keys() - known.keys():
            del self._names[parameter]

    def _pass_on(self, gone: Mapping[Tensor, ParameterState], replaced: Mapping[Tensor, Tensor]) -> None:
        """Pass the states of parameters that are gone to those that took their places."""
        if not replaced:
            return
        self._names.update({heir: self._names[old] for old, heir in replaced.items() if old in self._names})
        names = self.parameter_names()
        for old, heir in replaced.items():
            check_heir(gone[old], heir, names.get(heir, "param"))
        for group in self._groups():
            members = set(group["params"])
            self.make(group, [heir for heir in replaced.values() if heir in members])
        lost = [names[heir] for old, heir in replaced.items() if not pass_on(gone[old], self.stores[heir])]
        self.remove(replaced)
        if lost:
            warnings.warn(
                f"'{lost[0]}' was replaced by a parameter of other values: it starts from these.", stacklevel=4
            )

    def _is_at(self, parameter: Tensor, groups: Sequence[Group]) -> bool:
        """Whether a parameter still has the place that it had when the groups were last looked at."""
        number, index = self._places.get(parameter, (0, 0))
        members = groups[number]["params"] if number < len(groups) else ()
        return index < len(members) and members[index] is parameter

    def orphans(self) -> list[Tensor]:
        """Parameters that have a store and no param group any more."""
        self.follow()
        return [parameter for parameter in self._left if parameter in self.stores]

    # ── writes to the weights from outside the optimizer ────────────────────────────────────────────────────────────

    def adopt_writes(self, stores: Iterable[ParameterState], audit_every: int = 0, *, loaded: bool = True) -> None:
        """Adopt what was written to parameters outside the optimizer, before their stores are used.

        Args:
            stores: those about to be used.
            audit_every: also find writes that raise no version counter, in stores whose next step is audited.
            loaded: whether to include stores whose state was just loaded, which binds the present weight to the state.
        Raises:
            RecipeError: a parameter is not what its states were made for.
        """
        looked_at = list(stores)
        if not loaded:
            looked_at = [s for s in looked_at if s.snapshot is not None and s.snapshot.version is not None]
        modified = dict.fromkeys(store for store in looked_at if not is_unmodified(store))
        others = [store for store in looked_at if store not in modified] if audit_every else []
        if found := [*modified, *(modified_silently(others, audit_every) if others else [])]:
            self.adopt(found)

    def adopt(self, stores: Sequence[ParameterState]) -> None:
        """Adopt the present weights of parameters, known to be modified or not; the first time one was, warn."""
        names = self.parameter_names()
        brought = self._bring_states()
        stores = [store for store in stores if store not in brought or not is_unmodified(store)]
        for store in stores:
            check_matches_states(store, names.get(store.owner, "param"))
        found = [names.get(store.owner, "param") for store in stores if adopt_modified(store)]
        if found and not self._warned:
            self._warned = True
            more = f" and of {len(found) - 1} more parameters" if len(found) > 1 else ""
            warnings.warn(
                f"weights of '{found[0]}'{more} were modified outside this optimizer: it adopts them and discards the tails "
                "that were stored with them. This warning appears once.",
                stacklevel=2,
            )

    def _bring_states(self) -> set[ParameterState]:
        """Move states to the devices that their parameters have been moved to; returns the stores of these."""
        moved = {store for store in self.stores.values() if is_elsewhere(store)}
        alone = set(moved)
        if not moved:
            return moved
        buckets, self.buckets = self.buckets, []
        for bucket in buckets:
            leaving = [member for member in bucket.members if member in moved]
            staying = [member for member in bucket.members if member not in moved]
            self.buckets += [bucket] if not leaving else [*without(bucket, staying), *without(bucket, leaving)]
            for member in leaving:
                alone.remove(member)
                settle(member)
        bring(alone)
        return moved


def read_leading(stores: Sequence[ParameterState], count: int, name: str) -> list[Tensor]:
    """The first values of each store's weight or state.

    Unpacking costs the same for one value as for a thousand, so the leading words of all stores of one storage are joined
    and unpacked at once; storages that lie in rows, whose scales differ, are unpacked one by one.

    Invariant: they are those of ``store.stored(name)``, bit for bit.

    Args:
        stores: each has a weight or state of that name.
        count: how many values of each.
        name: ``weight`` or a state.
    Returns:
        float32 ``[count]`` for each, fewer where there are fewer.
    """
    first = [leading(store, count) for store in stores]
    found: dict[int, Tensor] = {}
    alike: dict[Storage, list[int]] = {}
    for place, store in enumerate(first):
        if store is stores[place] or codec.by_rows(store.storage):
            found[place] = store.stored(name)
        else:
            alike.setdefault(store.storage, []).append(place)
    for storage, places in alike.items():
        members = [first[place] for place in places]
        words = {key: torch.cat([store.words[key] for store in members], 1) for key in members[0].words}
        joined = torch.cat([store.parameter for store in members])
        values = ParameterState(joined, joined, storage, members[0].kernel, words).stored(name)
        found.update(zip(places, values.split([len(store.parameter) for store in members]), strict=True))
    return [found[place].reshape(-1)[:count] for place in range(len(stores))]


def leading(store: ParameterState, count: int) -> ParameterState:
    """A store of the first elements alone, at least ``count`` or all: whole words, and whole rows where it has rows.

    It is only for reading: its words are copies or views.
    """
    matrix = codec.matrix_of(store.storage, store.parameter.shape)
    lanes = codec.num_lanes(store.storage)
    wanted = -(-count // matrix[1]) if len(matrix) == 2 else -(-count // lanes) * lanes
    if wanted >= matrix[0]:
        return store
    groups = wanted if len(matrix) == 2 else wanted // lanes
    return ParameterState(
        store.owner,
        store.parameter.detach().reshape(matrix)[:wanted],
        store.storage,
        store.kernel,
        {name: words[:, :groups] for name, words in store.words.items()},
        {name: bound[:wanted] for name, bound in store.bounds.items()},
    )


# ── parameters that were moved or replaced ──────────────────────────────────────────────────────────────────────────────

Place = tuple[int, int]
"""The number of a group and of a parameter in it."""


def places_of(groups: Sequence[dict[str, Any]]) -> dict[Tensor, Place]:
    """The place of each parameter."""
    return {p: (number, index) for number, group in enumerate(groups) for index, p in enumerate(group["params"])}


def heir_of(store: ParameterState, place: Place | None, groups: Sequence[dict[str, Any]]) -> Tensor | None:
    """The parameter that has taken the place of another of its shape; ``None`` where there is none."""
    if place is None or is_sharded(store.owner) or place[0] >= len(groups):
        return None
    members = groups[place[0]]["params"]
    heir = members[place[1]] if place[1] < len(members) else None
    return heir if heir is not None and heir is not store.owner and heir.shape == store.owner.shape else None


def check_heir(store: ParameterState, heir: Tensor, name: str) -> None:
    """Refuse a parameter in another format than the one whose place it took.

    Raises:
        RecipeError: it is.
    """
    wanted = getattr(torch, store.storage.visible)
    if heir.dtype is not wanted:
        kind, given = (str(dtype).removeprefix("torch.") for dtype in (wanted, heir.dtype))
        raise RecipeError(
            f"parameter '{name}' was replaced by a {given} one, and its storage '{store.storage.name}' holds {kind} weights.",
            "Accelerate's FSDP2 does so unless mixed_precision='no': leave it so, since the recipe says what to compute in.",
        )


def pass_on(old: ParameterState, new: ParameterState) -> bool:
    """Pass a state to the store of the parameter that took its place, where that has the same visible bits.

    Args:
        old: of a whole parameter.
        new: of the same parameter in other memory, or of this rank's shard of it; all zero.
    Returns:
        Whether it did.
    """
    device = new.parameter.device
    shown = own_part(new.owner, old.owner.detach().to(device))
    if shown.dtype is not new.parameter.dtype or not torch.equal(shown, new.parameter.detach()):
        return False
    values = old.in_parameter_order()
    new.take({n: v.to(device) if n in old.extras else own_part(new.owner, v.to(device)) for n, v in values.items()})
    new.step, new.begun, new.notes = old.step, old.begun, old.notes
    snapshot_adopted(new)
    return True


def is_elsewhere(store: ParameterState) -> bool:
    """Whether the states of a parameter are on another device than it is."""
    kept = next(iter(store.tensors()), None)
    return kept is not None and kept.device != store.parameter.device


def bring(stores: Iterable[ParameterState]) -> None:
    """Move states, but for those in buckets, to the devices of their parameters.

    A write but one through ``.data`` shows in the version counter, so bits whose counter stands have only been moved.
    """
    for store in stores:
        device = store.parameter.device
        for kept in (store.words, store.bounds, store.extras):
            kept.update({name: tensor.to(device) for name, tensor in kept.items()})
        settle(store)


def settle(store: ParameterState) -> None:
    """Forget what a store knows of the memory that it has left."""
    store.__dict__.pop("plane_words", None)
    if store.last_visible is not None:
        store.last_visible = store.last_visible.to(store.parameter.device)
    before, now = store.snapshot, snapshot_of(store)
    if before is not None and before.version == now.version:
        now.fingerprint, now.num_writes = before.fingerprint, before.num_writes
        store.snapshot = now


# ── weights that were modified outside the optimizer ────────────────────────────────────────────────────────────────────

OFTEN = 2
"""Modifications after which a copy of the visible weight is stored, so that the next one is adopted element by element."""


def snapshot_of(store: ParameterState, *, bound: bool = True) -> Snapshot:
    """A snapshot of a parameter now; with ``bound=False`` the value that it has at its next step belongs to its states."""
    weight = store.parameter
    version = _version(store) if bound else None
    return Snapshot(weight.detach(), weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, version)


def _version(store: ParameterState) -> int:
    version: int = store.owner._version
    return version if store.parameter is store.owner else version + store.parameter._version


def has_tail(store: ParameterState) -> bool:
    """Whether the stored weight has a part that does not say which visible weight it belongs to."""
    return bool(store.storage.beside) and not store.storage.master


def is_unmodified(store: ParameterState) -> bool:
    """Whether a parameter was neither moved, replaced nor (but through ``.data``) written to since its last step."""
    weight, snapshot, owner = store.parameter, store.snapshot, store.owner
    if weight is owner:
        version: int = owner._version
    else:
        weight = store.parameter = local_of(owner)  # the local tensor of a DTensor may have been replaced
        version = _version(store)
    return (
        snapshot is not None
        and version == snapshot.version
        and weight.data_ptr() == snapshot.address
        and weight.shape == snapshot.shape
        and weight.stride() == snapshot.stride
        and weight.dtype is snapshot.dtype
    )


def check_matches_states(store: ParameterState, name: str) -> None:
    """Refuse a parameter that its states do not fit any more.

    Raises:
        RecipeError: its shape, dtype or device is not what it was.
    """
    snapshot, weight = store.snapshot, store.parameter
    device = next((kept.device for kept in store.tensors()), weight.device)
    if snapshot is None or (weight.shape, weight.dtype, weight.device) == (snapshot.shape, snapshot.dtype, device):
        return
    now, then = (_described(*kind) for kind in ((weight.dtype, weight.shape), (snapshot.dtype, snapshot.shape)))
    raise RecipeError(
        f"parameter '{name}' is {now} on {weight.device} now, and its states were made for {then} on {device}.",
        "Change a model before its optimizer is built: build a new one for it as it is, and load or ng.convert what was "
        "saved from before.",
    )


def _described(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"


def snapshot_after_step(stores: Sequence[ParameterState], audit_every: int) -> None:
    """Take snapshots of parameters after a step."""
    for store in stores:
        snapshot = store.snapshot
        assert snapshot is not None
        weight = store.parameter
        snapshot.version = weight._version if weight is store.owner else _version(store)
        snapshot.fingerprint = None
        if store.owns_copy:
            assert store.last_visible is not None
            store.last_visible.copy_(store.parameter.detach())
        if audit_every and (snapshot.checksum is not None or (store.step + 1) % audit_every == 0):
            audited = (store.step + 1) % audit_every == 0 and store.last_visible is None and has_tail(store)
            snapshot.checksum = checksum(store, (store.step + 1) // audit_every) if audited else None


def modified_silently(stores: Sequence[ParameterState], audit_every: int) -> list[ParameterState]:
    """Those whose next step is audited and whose bits have changed although their version counters have not."""
    found = []
    for store in stores:
        if (store.step + 1) % audit_every == 0 and has_tail(store) and store.snapshot is not None:
            if store.last_visible is not None:
                found.append((store, (_bits(store.last_visible) != _bits(store.parameter.detach())).any()))
            elif (spot := store.snapshot.checksum) is not None:
                now = checksum(store, (store.step + 1) // audit_every)
                found.append((store, spot != (spot + 1 if now is None else now)))
    flags = torch.stack([flag for _, flag in found]).tolist() if found else []  # one wait for a device, not many
    return [store for (store, _), flag in zip(found, flags, strict=True) if flag]


def snapshot_adopted(store: ParameterState) -> None:
    """Take a snapshot of a parameter whose value was just stored; a fingerprint finds any write before the first step."""
    store.snapshot = snapshot_of(store)
    store.snapshot.fingerprint = fingerprint(store.parameter) if has_tail(store) else None


def checksum(store: ParameterState, turn: int) -> Tensor | None:
    """Checksum of the words that audit number ``turn`` covers, int64 0-d; ``None`` where they cannot be read as words."""
    words = store.weight_words()
    if words is None or not words[0].numel():
        return None
    row = words[0][0].numel()
    ((part, _),) = [p for p in audited_parts(words[0].shape[0], turn, row) if p[1]]
    return torch.stack([half[part].sum(dtype=torch.int64) for half in words]).sum()


def adopt_modified(store: ParameterState) -> int:
    """Adopt the value of a parameter that was modified.

    Returns:
        How many elements were adopted: those that changed, or all where that is unknown.
    """
    weight = store.parameter.detach()
    before, store.snapshot = store.snapshot, snapshot_of(store)
    if before is None or before.version is None or not store.storage.beside:
        return 0
    store.snapshot.num_writes = before.num_writes
    if store.storage.master:
        return int(store.outdated().sum())  # the next step adopts them
    if before.fingerprint is not None and before.fingerprint == fingerprint(weight):
        store.snapshot.fingerprint = before.fingerprint
        return 0
    changed = torch.ones_like(weight, dtype=torch.bool)
    if store.last_visible is not None:
        changed = (_bits(store.last_visible) != _bits(weight)).view(weight.shape)
    count = int(changed.sum())
    if count:
        store.discard_tails(changed)
        store.snapshot.num_writes += 1
    if store.snapshot.num_writes >= OFTEN and store.last_visible is None:
        store.last_visible, store.owns_copy = weight.clone(memory_format=torch.contiguous_format), True
    return count


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(codec.INTEGER[8 * values.element_size()])
