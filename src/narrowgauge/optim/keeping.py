"""Keeping: what an optimizer holds of its parameters, and how that is handed out, taken back and saved.

Each parameter has a :class:`~narrowgauge.optim.stores.Store`, made at its first step or when float32 weights are adopted.
What a store holds are words whose layout nobody else knows; here they become tensors shaped like the parameter, in
torch's own ``state_dict`` and hooks, uncast and without losing a bit.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge._torch import plain_name
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.rounding import step_seed
from narrowgauge.optim.entries import States, notes_of
from narrowgauge.optim.kernels import StepKernel
from narrowgauge.optim.leading import read_leading
from narrowgauge.optim.loading import Losses, take_plain, taken_steps, without_none
from narrowgauge.optim.options import check_options
from narrowgauge.optim.outside import adopt_written, check_kept, is_as_left, mark, trace_of, written_unseen
from narrowgauge.optim.rules.elementwise import ADAMW, Rule
from narrowgauge.optim.rules.matrix import MatrixRule, shapes_of_states
from narrowgauge.optim.shards import local_of, placed_like
from narrowgauge.optim.stores import Bucket, Store, make_stores, without
from narrowgauge.optim.validation import (
    agree,
    check_real,
    check_rule,
    check_unchanged,
    check_visible,
    known_row,
)
from narrowgauge.spec.storages import Storage, for_vectors

WORTH_COMPILING = 1 << 18
"""Elements of one storage from which compiling its kernel pays within a short run."""


class Keeping(torch.optim.Optimizer):
    """The part of :class:`narrowgauge.Optimizer` that holds states; the other part takes steps."""

    rule: Rule | MatrixRule
    rows: dict[str, Storage]
    compile: bool | None
    released: set[Tensor]
    _names: dict[Tensor, str]
    _stores: dict[Tensor, Store]
    _buckets: list[Bucket]
    _states: States
    _told_of_writes: bool
    _kernels: dict[tuple[str, Storage], StepKernel]

    def settle(self) -> None:
        """Take note of what the last step decided."""
        raise NotImplementedError

    def _forget_last_step(self) -> None:
        """States were loaded: what the last step decided belongs to others."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in ``torch.optim``; the group may name its own ``storage``.

        Raises:
            RecipeError: an option that the rule cannot obey, an unknown storage, or a parameter in another format than its
                visible one.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _name_each_once(group)
        try:
            check_options(group, self.rule)
            row = known_row(group["storage"], self.rows)
            self.rows[row.name], group["storage"] = row, row.name
            for parameter in group["params"]:
                check_real(parameter)
                check_visible(parameter, self._storage_of(group, parameter))
                check_rule(self._rule_of(group, parameter), self._storage_of(group, parameter))
        except RecipeError:
            self.param_groups.pop()
            raise

    def _storage_of(self, group: dict[str, Any], parameter: Tensor) -> Storage:
        row = known_row(group["storage"], self.rows)
        return for_vectors(row) if parameter.ndim < 2 else row

    def _rule_of(self, group: dict[str, Any], parameter: Tensor, kept: Collection[str] = ()) -> Rule | MatrixRule:
        """The rule that steps a parameter under its group's options, where it has states of some names already.

        AdamW for what is no matrix, and for groups that ask for it, where the optimizer's rule takes matrices.
        """
        plain = parameter.ndim < 2 or group.get("rule") == ADAMW.name
        rule = ADAMW if isinstance(self.rule, MatrixRule) and plain else self.rule
        return rule if isinstance(rule, MatrixRule) else rule.under(group, kept)

    def _worth_compiling(self, num_elements: int) -> bool:
        return self.compile if self.compile is not None else num_elements >= WORTH_COMPILING

    def _initialise(
        self, group: dict[str, Any], parameters: list[Tensor], kept: Mapping[Tensor, Collection[str]] | None = None
    ) -> None:
        """Give states to parameters that have none; ``kept``: names of those that they are about to be given."""
        alike: dict[tuple[str, Storage, torch.device], list[Tensor]] = {}
        rules: dict[str, Rule | MatrixRule] = {}
        extras: dict[Tensor, dict[str, Tensor]] = {}
        for parameter in parameters:
            if parameter in self._stores:
                continue
            row = self._storage_of(group, parameter)
            check_visible(parameter, row)
            rule = self._rule_of(group, parameter, (kept or {}).get(parameter, ()))
            if isinstance(rule, MatrixRule):
                states = rule.states(tuple(parameter.shape), group)
                row = row.keeping(tuple((name, k.role) for name, k in states.items() if k.role is not None))
                extras[parameter] = {
                    name: torch.zeros(k.shape, dtype=torch.float32, device=parameter.device)
                    for name, k in states.items()
                    if k.role is None
                }
            else:
                row = row.keeping(rule.kept)
            rules[rule.name] = rule
            alike.setdefault((rule.name, row, parameter.device), []).append(parameter)
        for (name, row, _), members in alike.items():
            joined = not isinstance(rules[name], MatrixRule)
            stores, buckets = make_stores(members, row, self._kernel(rules[name], row), joined=joined)
            self._buckets += buckets
            for store in stores:
                store.extras = extras.get(store.owner, {})
                if row.master:
                    store.adopt(store.parameter)
                store.trace = trace_of(store)
                store.asked = group["storage"]
                self._stores[store.owner] = store

    def _restate(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Give parameters the states that options which were set since have come to ask for; others stay bit for bit.

        Raises:
            RecipeError: options that states of other shapes, or another rule, would be needed for.
        """
        if isinstance(self.rule, Rule) and self.rule.reduces is None:
            return  # its states are what they are
        kept: dict[Tensor, set[str]] = {}
        for parameter in parameters:
            if (store := self._stores.get(parameter)) is not None:
                rule = self._rule_of(group, parameter, store.shapes_of_states)
                wanted = shapes_of_states(rule, parameter.shape, group)
                if isinstance(self.rule, MatrixRule):
                    check_unchanged(store.kernel.rule.name, store.shapes_of_states, rule.name, wanted)
                if wanted.keys() - store.shapes_of_states.keys():
                    kept[parameter] = {*wanted, *store.shapes_of_states}
        old = {parameter: self._stores.pop(parameter) for parameter in kept}
        self._buckets = [b for b in self._buckets if not any(member.owner in old for member in b.members)]
        self._initialise(group, list(kept), kept)
        for parameter, store in old.items():
            self._stores[parameter].inherit(store)
            self._stores[parameter].trace = trace_of(
                store, bound=store.trace is None or store.trace.version is not None
            )

    def _kernel(self, rule: Rule | MatrixRule, storage: Storage) -> StepKernel:
        key = rule.name, storage
        if key not in self._kernels:
            if isinstance(rule, MatrixRule):
                # It decides on whole matrices; the kernel is only told what to write.
                names = tuple(state for state, _ in storage.states)
                given = Rule(rule.name, names, (), lambda group, step: (), rule.update)
                self._kernels[key] = StepKernel(given, storage, compile=False)
            else:
                rows = [(self._storage_of(g, p), p) for g in self.param_groups for p in g["params"]]
                total = sum(p.numel() for row, p in rows if row.keeping(rule.kept) == storage)
                self._kernels[key] = StepKernel(rule, storage, compile=self._worth_compiling(total))
        return self._kernels[key]

    # ── the state, as torch.optim's users know it ───────────────────────────────────────────────────────────────────

    @property  # type: ignore[override]
    def state(self) -> States:
        """What is kept of each parameter: ``state[p]["exp_avg"]`` as in ``torch.optim``; see :class:`States`."""
        return self._states

    @state.setter
    def state(self, given: Mapping[Any, Any]) -> None:
        if given is not self._states:
            entries = {key: dict(value) if isinstance(value, Mapping) else value for key, value in given.items()}
            self._states.clear()
            self._states.update(entries)

    def holds(self, parameter: object) -> bool:
        """Whether it is one of this optimizer's parameters."""
        return isinstance(parameter, Tensor) and self._group_of(parameter) is not None

    def _group_of(self, parameter: Tensor) -> dict[str, Any] | None:
        return next((g for g in self.param_groups if any(parameter is p for p in g["params"])), None)

    def kept_parameters(self) -> dict[Tensor, None]:
        """Those that have a state, in the order in which they came to it."""
        known = set(self._parameters())
        return {parameter: None for parameter in self._stores if parameter in known}

    def store_of(self, parameter: Tensor) -> Store | None:
        """What is kept of a parameter, with all that was written to it; ``None`` where nothing is."""
        self.settle()
        if (store := self._stores.get(parameter)) is not None:
            self._look_at(self._bound([store]))
        return store

    def begin(self, parameter: Tensor, name: str) -> Store:
        """Give a parameter its states, ``name`` among them if the rule has one of that name."""
        group = self._group_of(parameter)
        assert group is not None
        with torch.no_grad():
            self._initialise(group, [parameter], {parameter: (name,)})
        return self._stores[parameter]

    def drop(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Forget what is kept of parameters, or of all: they begin anew, each weight as it is seen."""
        self.settle()
        self.state.take_writes()
        chosen = list(self._stores if parameters is None else parameters)
        gone = {self._stores.pop(parameter) for parameter in chosen if parameter in self._stores}
        if not gone:
            return
        for store in gone:
            self.state.forget(store)
        buckets, self._buckets = self._buckets, []
        for bucket in buckets:
            touched = any(member in gone for member in bucket.members)
            self._buckets += without(bucket, gone) if touched else [bucket]

    def _forget_strangers(self) -> None:
        """Drop what is kept of parameters whose group was taken away."""
        if len(self._stores) > 0:
            known = set(self._parameters())
            self.drop([parameter for parameter in self._stores if parameter not in known])

    # ── what others do to the weights ───────────────────────────────────────────────────────────────────────────────

    def refresh(self) -> None:
        """Adopt weights that were set in a way that cannot be noticed: through ``.data``, or in memory that they share.

        What is written to a parameter otherwise (``load_state_dict``, ``copy_``, ``clamp_`` under ``no_grad``) is noticed
        before the next step; there is no need to call this. The stored weight of an element whose visible bits are not
        those that the last step left becomes the visible one, exactly; others keep what they have. Of a large matrix
        with tails nobody knows which those are, and all its tails are dropped.

        Raises:
            RecipeError: a parameter has another shape, dtype or device than its states were made for.

        Example:
            >>> import torch, narrowgauge as ng
            >>> weight = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
            >>> optimizer = ng.AdamW([weight], lr=1e-3, storage="word")
            >>> weight.grad = torch.ones_like(weight)
            >>> optimizer.step()
            >>> weight.data.fill_(3.0)[0, 0].item(), optimizer.refresh()
            (3.0, None)
            >>> optimizer.stored(weight)[0, 0].item()
            3.0
        """
        with torch.no_grad():
            self._adopt_written(list(self._stores.values()))

    def _look_at(self, stores: Sequence[Store], audit_every: int = 0) -> None:
        """Before stores are used: adopt what others have written to their parameters, and refuse what they changed."""
        written = dict.fromkeys(store for store in stores if not is_as_left(store))
        quiet = [store for store in stores if store not in written] if audit_every else []
        if found := [*written, *(written_unseen(quiet, audit_every) if quiet else [])]:
            self._adopt_written(found)

    @staticmethod
    def _bound(stores: Iterable[Store]) -> list[Store]:
        """Those whose weights are there: after a state was loaded they may still follow, and to look is not to bind them."""
        return [store for store in stores if store.trace is not None and store.trace.version is not None]

    def _adopt_written(self, stores: Sequence[Store]) -> None:
        names = self.parameter_names()
        for store in stores:
            check_kept(store, names.get(store.owner, "param"))
        found = [names.get(store.owner, "param") for store in stores if adopt_written(store)]
        if found and not self._told_of_writes:
            self._told_of_writes = True
            more = f" and of {len(found) - 1} more parameters" if len(found) > 1 else ""
            warnings.warn(
                f"weights of '{found[0]}'{more} were set by something else than this optimizer; they are adopted, and what was "
                "kept beside them is dropped. This is said once.",
                stacklevel=2,
            )

    # ── what is kept ────────────────────────────────────────────────────────────────────────────────────────────────

    def adopt(
        self, values: Mapping[Tensor, Tensor], states: Mapping[Tensor, Mapping[str, Tensor | int]] | None = None
    ) -> None:
        """Take float32 weights, and perhaps states, into the storage: parameters become their visible part.

        Args:
            values: the float32 weight of each parameter, of its shape; cut to the nearest.
            states: of each parameter its states as float32, by name, and under ``step`` the number of steps taken. A
                code that rounds stochastically does so here: the nearest of many equal values would all err alike.
        """
        for group in self.param_groups:
            mine = [p for p in group["params"] if p in values]
            self._initialise(group, mine)
            for place, parameter in enumerate(mine):
                store, given = self._stores[parameter], (states or {}).get(parameter, {})
                store.adopt(local_of(values[parameter]))
                mark(store)
                store.step = int(given.get("step", store.step))
                seed = self._seed_of(group, store, place)
                for name, value in given.items():
                    if isinstance(value, Tensor) and name != "step":
                        store.put(name, local_of(value), seed)

    def stored(self, parameter: Tensor, name: str = "weight") -> Tensor:
        """The value that is kept, as float32.

        Args:
            parameter: one of the optimizer's parameters.
            name: ``"weight"``, or a state such as ``"exp_avg"`` or ``"exp_avg_sq"``.
        Returns:
            float32 tensor of the parameter's shape, a copy (a DTensor where the parameter is one). Before the first step
            the weight is the parameter itself and moments are zero.
        Raises:
            KeyError: the parameter or the name is unknown.
        """
        store = self._stores.get(parameter)
        self.state.take_writes()
        if store is not None:
            self._look_at(self._bound([store]))
        if store is not None and (name == "weight" or name in store.shapes_of_states):
            return placed_like(parameter, store.stored(name))
        group = next((g for g in self.param_groups if any(parameter is p for p in g["params"])), None)
        if group is None:
            raise KeyError("this tensor is not one of the optimizer's parameters")
        rule = self._rule_of(group, parameter, (name,))
        known = shapes_of_states(rule, parameter.shape, group)
        if name != "weight" and name not in known:
            raise KeyError(f"rule '{rule.name}' keeps {('weight', *known)}, not '{name}'")
        return parameter.detach().float().clone() if name == "weight" else torch.zeros_like(parameter).float()

    def leading(self, parameters: Iterable[Tensor], count: int, name: str = "weight") -> list[Tensor | None]:
        """The first values of :meth:`stored` of some parameters, without reading the others.

        Args:
            parameters: of this optimizer; of a sharded one the part that is here is meant.
            count: how many of each; fewer where there are fewer.
            name: ``"weight"``, or a state.
        Returns:
            float32 ``[count]`` for each, or ``None`` where nothing is kept under that name yet.
        """
        stores = [self._stores.get(parameter) for parameter in parameters]
        known = [s for s in stores if s is not None and (name == "weight" or name in dict(s.storage.states))]
        values = dict(zip(map(id, known), read_leading(known, count, name), strict=True))
        return [values.get(id(store)) for store in stores]

    def num_steps(self, parameter: Tensor) -> int:
        """Steps that a parameter has taken; 0 before the first."""
        store = self._stores.get(parameter)
        return 0 if store is None else store.step

    def bytes_per_param(self) -> float:
        """Bytes of weights, gradients (in the parameters' format) and states per parameter, counted from live tensors.

        A gradient that is released as it arrives (:func:`narrowgauge.optim.gradient_release.release_gradients`) is not counted.
        """
        parameters = [local_of(p) for p in self._parameters()]
        held = [local_of(p) for p in self._parameters() if p not in self.released]
        states = [words for store in self._stores.values() for words in store.tensors()]
        total = sum(t.numel() * t.element_size() for t in [*parameters, *held, *states])
        return total / max(1, sum(p.numel() for p in parameters))

    def parameter_names(self) -> dict[Tensor, str]:
        """The name of each parameter: as given, else as its model has it, else ``"param 0"``, ``"param 1"`` …"""
        names: dict[Tensor, str] = {}
        for group in self.param_groups:
            given = group.get("param_names") or [None] * len(group["params"])
            for parameter, name in zip(group["params"], given, strict=True):
                names[parameter] = name or self._names.get(parameter) or f"param {len(names)}"
        return names

    def name_parameters(self, model: nn.Module) -> None:
        """Take a model's names for parameters that were given without: alarms and readings then say them."""
        self._names.update({parameter: plain_name(name) for name, parameter in model.named_parameters()})

    # ── saving and loading ──────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """The state, lossless: every plane as a tensor of the parameter's shape in its packed form.

        Returns:
            As in ``torch.optim``; a state that is a plain tensor has torch's key (``exp_avg``), others are ``tail``,
            ``master`` (float32), ``weight_low`` and ``packed``, and ``…_bound`` is the scale of each row. ``step`` is a 0-d
            float32 tensor. DTensors where the parameter is one.
        """
        self._forget_strangers()
        handle = self.register_state_dict_post_hook(_show_states, prepend=True)  # before hooks of others see it
        try:
            result: dict[str, Any] = super().state_dict()
            return result
        finally:
            handle.remove()

    def _numbered_states(self) -> dict[int, dict[str, Tensor]]:
        index = {p: k for k, p in enumerate(self._parameters())}
        return {index[p]: entry for p, entry in self.states().items()}

    def states(self) -> dict[Tensor, dict[str, Tensor]]:
        """The part of :meth:`state_dict` that belongs to each parameter."""
        self.settle()
        self._forget_strangers()
        self.state.take_writes()
        self._look_at(self._bound(self._stores.values()))
        result = {}
        for parameter, store in self._stores.items():
            values = {
                name: value if name in store.extras else placed_like(parameter, value)
                for name, value in store.in_parameter_order().items()
            }
            step = torch.tensor(float(store.step), dtype=torch.float32)
            result[parameter] = {"step": step, **values, **store.notes}
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; nothing is cast, and a state that is refused changes nothing.

        Raises:
            RecipeError: the state was saved from another storage or shape.
            ValueError: the groups do not match, as in ``torch.optim``.
        """
        handle = self.register_load_state_dict_pre_hook(_take_states)  # after hooks of others have changed it
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def load_states(
        self, entries: Mapping[Tensor, Mapping[str, Any]], groups: list[dict[str, Any]] | None = None
    ) -> None:
        """Restore what :meth:`states` gave, in place of all states; one that is refused changes nothing.

        Args:
            entries: of each parameter its state.
            groups: options that the states were made under, where they are not the optimizer's own; those that say no
                ``storage`` are of a plain ``torch.optim``, whose moments are cut.
        Raises:
            RecipeError: a state was saved from another storage, rule or shape.
        """
        if any("storage" not in group for group in groups or ()):
            self._look_at(self._bound(self._stores.values()))  # a plain state leaves weights what they are
        before = self._stores, self._buckets
        self._stores, self._buckets = {}, []
        losses = Losses()
        try:
            for mine, saved in zip(self.param_groups, groups or self.param_groups, strict=True):
                group, is_plain = {**mine, **saved, "params": mine["params"]}, "storage" not in saved
                given = {p: without_none(entries[p]) for p in group["params"] if p in entries}
                loaded = {
                    p: {name: local_of(value) for name, value in entry.items()} for p, entry in given.items() if entry
                }
                self._initialise(group, list(loaded), loaded)
                for place, (parameter, entry) in enumerate(loaded.items()):
                    store = self._stores[parameter]
                    if is_plain:
                        take_plain(store, entry, before[0].get(parameter), self._seed_of(group, store, place), losses)
                    else:
                        store.take(entry)
                        store.notes = notes_of(store, entry)
                    store.step = taken_steps(entry, store.kernel.rule.name)
                    # The weights that belong to it may have been loaded before, or will be after.
                    store.trace = trace_of(store, bound=False)
        except BaseException:
            self._stores, self._buckets = before
            raise
        self.state.forget()
        self._forget_last_step()
        losses.tell()

    @staticmethod
    def _seed_of(group: dict[str, Any], store: Store, place: int) -> Tensor:
        """Of the cuts by which a state is taken: none that a step has."""
        return torch.tensor(step_seed(group["seed"], -1 - place), dtype=torch.int32, device=store.parameter.device)

    def _parameters(self) -> list[Tensor]:
        """All parameters, in the order of :meth:`state_dict`."""
        return [p for group in self.param_groups for p in group["params"]]


def _show_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """A hook: what is kept, as it is handed out, in place of the words it is kept in."""
    assert isinstance(optimizer, Keeping)
    state_dict["state"] = {**optimizer._numbered_states(), **optimizer.state.free}


def _take_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook: load what belongs to parameters, uncast, and leave the groups to torch."""
    assert isinstance(optimizer, Keeping)
    saved = copy.deepcopy(state_dict["param_groups"])
    plain = ["storage" not in group for group in saved]
    agree(optimizer.param_groups, saved, optimizer.rule)
    # By numbers, or by names where a distributed checkpoint has put them.
    listed = [key for group in saved for key in group["params"]]
    members = dict(zip(listed, optimizer._parameters(), strict=True))
    free = {key: value for key, value in state_dict["state"].items() if key not in members}
    if strange := [key for key, value in free.items() if isinstance(key, int) or isinstance(value, Mapping)]:
        raise RecipeError(f"the state to load has an entry {strange[0]!r}, which none of its param groups lists.")
    options = [
        {name: value for name, value in group.items() if name != "storage" or not is_plain}
        for group, is_plain in zip(saved, plain, strict=True)
    ]
    entries = {members[key]: entry for key, entry in state_dict["state"].items() if key in members}
    optimizer.load_states(entries, options)
    return {"state": free, "param_groups": saved}


def _name_each_once(group: dict[str, Any]) -> None:
    """A tied weight that is given twice is one parameter, under its first name; torch has warned of it."""
    first: dict[Tensor, int] = {}
    for place, parameter in enumerate(group["params"]):
        first.setdefault(parameter, place)
    for key in ("params", "param_names"):
        if key in group:
            group[key] = [group[key][place] for place in first.values()]
