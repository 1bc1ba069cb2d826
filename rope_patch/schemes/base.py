"""A scheme: a frozen dataclass that fills slots of the one equation and knows no model.

x_m    = e(x_m, token_m, m)
s(m,n) = lambda(m) * < R_f(phi_q(m)) q_m , R_f(phi_k(n)) k_n > * scaling + b(q_m, k_n, m, n)
o_m    = sum_n c(m,n) softmax_n(s(m,n)) (v_n + u(m,n))
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_type_hints

import torch

from rope_patch.errors import MissingField, NotExpressible
from rope_patch.graphs import traced
from rope_patch.schemes.rules import rules_of
from rope_patch.schemes.slots import Checkpoint, ModelShape, Pairs, Region, Target, Tokens
from rope_patch.schemes.tools.rotary import inverse_frequencies
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, Regime, RotarySpec, Slot, Weights


@dataclass(frozen=True)
class Source:
    """The first publication of a scheme: the paper or the post, and a link to the authors' `code`, if there is any."""

    title: str
    year: int
    link: str
    code: str = ""


@dataclass(frozen=True)
class Sweep:
    """Values of a scheme's main field that are worth trying on a checkpoint with training length L.

    Attributes:
        field: the main field; empty for a scheme whose defaults are tried.
        unit: the unit of the values: `L`, the training length; `target`, the value of the field that
            `Scheme.fields_for` gives for the target; or `one`.
        values: numbers in that unit, best guess first.
        window: w in multiples of L; 0 for a scheme without a window.
    """

    field: str = ""
    unit: Literal["L", "target", "one"] = "one"
    values: tuple[float, ...] = (1,)
    window: float = 0.0


Sweeps = tuple[Sweep, ...] | None


@dataclass(frozen=True)
class Composed:
    """The rule that gives a composition the value of a class attribute of `Scheme`: `combine` receives the values of
    the parts, or, with `filling`, only those of the parts that fill one of these slot methods. It stands beside the
    attribute, in its annotation.
    """

    combine: Callable[[list[Any]], Any]
    filling: tuple[str, ...] = ()

    def of(self, name: str, parts: Iterable[Scheme]) -> Any:
        """Combine the values that `parts` have for the attribute `name`."""
        return self.combine(
            [getattr(part, name) for part in parts if not self.filling or not part.methods.isdisjoint(self.filling)]
        )


def _most_demanding(regimes: list[Regime]) -> Regime:
    return max(regimes, key=get_args(Regime).index)


def _any_and_all(values: list[bool]) -> bool:
    return bool(values) and all(values)


def _joined(names: list[tuple[str, ...]]) -> tuple[str, ...]:
    return sum(names, ())


IfAny = Annotated[bool, Composed(any)]
Names = Annotated[tuple[str, ...], Composed(_joined)]


class _SchemeType(type):
    """The metaclass of schemes: an error about missing required fields says what to write."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """The fields, which `inspect` would else hide behind `__call__`."""
        return inspect.Signature(list(inspect.signature(cls.__init__).parameters.values())[1:])  # type: ignore[misc]

    if not TYPE_CHECKING:  # else a type checker would accept any fields for any class

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            """Make an instance of the class.

            Raises:
                MissingField: a required field is missing.
            """
            parameters = cls.__signature__.parameters.values()
            positional = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
            missing = [
                each.name for each in positional[len(args) :] if each.default is each.empty and each.name not in fields
            ]
            if missing and dataclasses.is_dataclass(cls):
                values = ", ".join(f"{name}=..." for name in missing)
                raise MissingField(
                    f"{cls.__name__} needs {' and '.join(missing)}: write {cls.__name__}({values}), or "
                    f"patch(model, {cls.name!r}, {values})"
                )
            return super().__call__(*args, **fields)


class Scheme(metaclass=_SchemeType):
    """Base of all schemes. A subclass is a frozen dataclass; it fills a slot by overriding the slot's method.
    The annotation of a class attribute holds its type and its rule for compositions, see `Composed`.

    Where methods take them, `distance` is m - n in tokens, of any shape, `num_heads` the number of query heads, and
    `weights` the learned parameters by name.

    Class attributes:
        name: registry name, in snake_case.
        title: the name in tables and legends, where it differs from the name of the class.
        equation: the formula, as a line of text.
        source: the first publication.
        regime: the training that a pretrained checkpoint needs before it works under this scheme.
        summary: one plain sentence on the scheme; default the first line of the docstring.
        aliases: further names in papers and libraries; the class name and the `rope_type` are known anyway.
        length_dependent: whether the frequencies or the regions depend on the length of the text.
        regions_by_length: whether the regions depend on that length, see `at_length`.
        by_document: whether each document of a packed row counts its own length; otherwise the row's counts.
        learned_frequencies: whether the frequencies depend on learned parameters.
        refines: whether it derives its frequencies from those of another scheme, see `refine`.
        chooses_pairs: whether the frequencies decide which pairs rotate, also those that the checkpoint leaves still.
        decays: whether the rotation also decays, so that queries and keys are rotated by different tables.
        stills: whether all frequencies are zero, so that nothing rotates.
        linear: whether the bias is a multiple of the distance, so that under a causal mask one term per key is enough.
        only_masks: whether the bias only hides pairs, with values 0 and -inf, so that the checkpoint's own rotation or
            bias stays.
        absolute: whether a shift of all positions changes the scores.
        causal_only: whether the scheme has no meaning for keys after the query.
        keeps_rows: whether the first rows of its table of positions are the checkpoint's own.
        rope_type: the equivalent `rope_type` of Transformers; None where there is none.
        shared: names of the learned parameters that all layers share; each layer has its own copy of the others, and of
            all of them if a field `per_layer` is true.
        precise: names of the learned parameters that stay in float32 in a half-precision model.
        every_block: whether positions enter at the input of every layer, and not only of the first.
        breaks_graph: whether the scheme reads the values of positions, which a compiler does not have.
        reads_ids: whether its `embedding` depends on token ids.
        stateful: whether its `embedding` carries a state from token to token, see `advance`.
        by_layer: whether the scheme differs between layers, see `of_layers`.
        by_head: whether each query head has frequencies of its own.
        sweep: the values that a search for the best scheme tries; None if it skips this scheme.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    equation: ClassVar[str]
    source: ClassVar[Source]
    regime: ClassVar[Annotated[Regime, Composed(_most_demanding)]] = "training-free"
    summary: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    length_dependent: ClassVar[IfAny] = False
    regions_by_length: ClassVar[IfAny] = False
    by_document: ClassVar[IfAny] = False
    learned_frequencies: ClassVar[Annotated[bool, Composed(any, filling=("frequencies", "refine"))]] = False
    refines: ClassVar[Annotated[bool, Composed(_any_and_all, filling=("frequencies", "refine"))]] = False
    chooses_pairs: ClassVar[Annotated[bool, Composed(any, filling=("frequencies", "refine"))]] = False
    decays: ClassVar[IfAny] = False
    stills: ClassVar[Annotated[bool, Composed(_any_and_all, filling=("frequencies", "refine"))]] = False
    linear: ClassVar[Annotated[bool, Composed(all, filling=("bias",))]] = False
    only_masks: ClassVar[Annotated[bool, Composed(_any_and_all, filling=("bias", "content_bias", "running_bias"))]] = (
        False
    )
    absolute: ClassVar[IfAny] = False
    causal_only: ClassVar[IfAny] = False
    keeps_rows: ClassVar[Annotated[bool, Composed(all, filling=("embedding",))]] = False
    rope_type: ClassVar[str | None] = None
    shared: ClassVar[Names] = ()
    precise: ClassVar[Names] = ()
    every_block: ClassVar[IfAny] = False
    stateful: ClassVar[IfAny] = False
    breaks_graph: ClassVar[IfAny] = False
    reads_ids: ClassVar[IfAny] = False
    by_layer: ClassVar[IfAny] = False
    by_head: ClassVar[IfAny] = False
    sweep: ClassVar[Sweeps] = None
    composition: ClassVar[type[Scheme]]  # `Compose`, which is built on this class

    def __post_init__(self) -> None:
        """Check the fields by the rules in their annotations, see `rope_patch.schemes.rules`. A subclass that overrides
        this calls it first, and then checks what depends on several fields.

        Raises:
            InvalidField: names the field, its value and what is allowed.
        """
        if getattr(self, "per_layer", False):
            vars(self)["shared"] = ()
        if traced():
            return  # made of a scheme that was checked; a compiler cannot trace how annotations are read
        for rule in rules_of(type(self)).values():
            rule.check(self)

    def __add__(self, other: Scheme) -> Scheme:
        """Compose both schemes side by side, as `Compose(self, other)` does."""
        return type(self).composition(self, other)  # type: ignore[call-arg]

    def frequencies_on(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        """Like `frequencies`, but pairs that the checkpoint does not rotate stay unrotated, unless the scheme
        `chooses_pairs`.

        Args:
            rotary, length, weights: the arguments of `frequencies`.
        """
        frequencies = self.frequencies(rotary, length, weights)
        if rotary.rotating_pairs is None or self.chooses_pairs:
            return frequencies
        turns = torch.arange(frequencies.inv_freq.shape[-1], device=frequencies.inv_freq.device) < rotary.rotating_pairs
        return dataclasses.replace(frequencies, inv_freq=frequencies.inv_freq * turns)

    # --- slots ---------------------------------------------------------------------------------------------------

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        """The frequency f of each rotated pair, and the factor on cos and sin.

        Args:
            rotary: width, base and training length of the checkpoint's rotations.
            length: length of each row in tokens, `(batch,)`; given if the scheme is `length_dependent`.
            weights: given if the scheme has `learned_frequencies`.

        Raises:
            InvalidField: a field does not fit this width.
        """
        return self.refine(Frequencies(inverse_frequencies(rotary.dim, rotary.base)), rotary, weights)

    def refine(self, frequencies: Frequencies, rotary: RotarySpec, weights: Weights = NO_WEIGHTS) -> Frequencies:
        """Derive f from the frequencies of another scheme, in a scheme that `refines`. Listed beside that scheme it
        does not own the slot; listed alone it refines the checkpoint's own frequencies, and its `frequencies` are those
        of RoPE, refined.

        Args:
            frequencies: frequencies of the other scheme, `(d/2,)` or `(batch, d/2)`.
            rotary, weights: the arguments of `frequencies`.
        """
        return frequencies

    def segments(self) -> tuple[Region, ...]:
        """The position maps phi, as disjoint regions of (m, n); a pair in none of them is not attended."""
        raise NotImplementedError

    def at_length(self, length: int) -> Scheme:
        """The scheme for texts of `length` tokens. A scheme that has `regions_by_length` returns a scheme whose regions
        depend on this length alone; `segments` is called on the result.
        """
        return self

    def query_scale(self, positions: torch.Tensor, num_heads: int, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        """The factor lambda(m) on queries, float32, `(heads or 1, *positions.shape)`; `positions` are of any shape, at
        least 0.
        """
        raise NotImplementedError

    def bias(self, distance: torch.Tensor, num_heads: int, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        """The bias b by distance, float32, `(heads, *distance.shape)`; -inf hides a pair."""
        raise NotImplementedError

    def content_bias(self, pairs: Pairs, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        """The bias b by content, or by positions that a distance does not give. It is added to `pairs.scores`, to whose
        shape it broadcasts. Values for hidden pairs are ignored; -inf hides a pair.
        """
        raise NotImplementedError

    def running_bias(self, states: torch.Tensor, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        """The addend of each token to the running sum c of each head, float32, `(batch, length, heads)`; the bias is
        c_m - c_n.

        The sums of earlier tokens are kept in the cache. Softmax does not see c_m, so the fast kernels get a term per
        key alone.

        Args:
            states: the input of the attention module, as its projections see it, `(batch, length, hidden)`.
        """
        raise NotImplementedError

    def weight_factor(self, distance: torch.Tensor, num_heads: int, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        """The factor c on attention weights by distance, float32, `(heads, *distance.shape)`."""
        raise NotImplementedError

    def relative_values(
        self, attention: torch.Tensor, distance: torch.Tensor, weights: Weights = NO_WEIGHTS
    ) -> torch.Tensor:
        """The sum over n of attention(m, n) u(m, n), which is added to the output, `(batch, heads, q_len, value_dim)`.

        Args:
            attention: c(m, n) softmax_n(s(m, n)), `(batch, heads, q_len, kv_len)`.
            distance: m - n, `(batch or 1, q_len, kv_len)`.
        """
        raise NotImplementedError

    def embedding(self, tokens: Tokens, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        """The input e(x_m, token_m, m) that replaces the token's vector, in the shape and dtype of `tokens.states`.

        Raises:
            UnsupportedPositions: a position has no vector, or the scheme reads ids and the model received none.
        """
        raise NotImplementedError

    def advance(
        self, tokens: Tokens, state: torch.Tensor | None, weights: Weights = NO_WEIGHTS
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `embedding`, for a scheme that is `stateful`: the state summarises the earlier tokens.

        Args:
            tokens: the next ones of each row; a row begins anew at every position 0.
            state: the state after the token before these, `(batch, width)`; None at the beginning.

        Returns:
            the new states of the tokens, and the state after each of them, `(batch, length, width)`.
        """
        raise NotImplementedError

    def rows(self, native: torch.Tensor) -> torch.Tensor:
        """The rows at positions 0, 1, ..., `(N, hidden)`, for models that add a table of positions to their input.

        Args:
            native: the checkpoint's own rows, `(n, hidden)`.

        Raises:
            InvalidField: a field does not fit this table.
        """
        raise NotImplementedError

    # --- the length to reach -----------------------------------------------------------------------------------------

    @classmethod
    def fields_for(cls, target: Target) -> dict[str, Any]:
        """The values of open fields with which the scheme reaches a `target`; fields that you give win.

        Schemes whose fields follow from a length, or that reach every length unchanged, override this.

        Raises:
            InvalidField: the length is out of reach on this checkpoint, or beside what is given.
        """
        raise NotImplementedError

    @classmethod
    def fit(cls, best: Mapping[int, float]) -> dict[str, Any]:
        """Fit, by least squares, the fields of the rule by which the main field of `sweep` depends on the text's
        length.

        Schemes that have such a rule override this.

        Args:
            best: the best value of the field at each length in tokens.

        Returns:
            fields by name; none if there are too few lengths, or if one value is best at all of them.
        """
        return {}

    def reach(self, checkpoint: Checkpoint) -> Scheme:
        """Fill in the fields that follow from a target on this `checkpoint`; without a target the scheme stays as it
        is.

        Raises:
            InvalidField: see `fields_for`.
        """
        return self

    # --- learned parameters ----------------------------------------------------------------------------------------

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        """Initial values of the learned parameters that the scheme brings: float32, on the CPU, of any shape, by name.

        They start so that a pretrained model changes as little as the method allows. Every slot's method except
        `segments` receives the trained parameters as `weights`.

        Args:
            shape: the sizes of the model.
            random: the only source of chance; seeded alike for the same layer of every model.

        Raises:
            InvalidField: a field does not fit this model.
        """
        return {}

    def rope_parameters(self, rotary: RotarySpec) -> dict[str, Any]:
        """Express the scheme in Transformers' `rope_parameters`, without the fields that every type shares; fields that
        the scheme leaves open are read from the checkpoint's `rotary`.

        Raises:
            NotExpressible: Transformers has no equivalent.
        """
        if self.rope_type is None:
            slots = ", ".join(sorted(self.slots))
            raise NotExpressible(f"{self.name} fills {slots}; the rope_parameters of Transformers have no type for it")
        fields = {name: value for name, value in self.fields().items() if value is not None}
        if hasattr(self, original := "original_max_position_embeddings"):
            fields.setdefault(original, rotary.training_length)
        return {"rope_type": self.rope_type, **fields}

    # --- what the library derives ---------------------------------------------------------------------------------

    @property
    def methods(self) -> frozenset[str]:
        """The slot methods that this scheme overrides."""
        cls = type(self)
        return frozenset(name for name in SLOTS if getattr(cls, name) is not getattr(Scheme, name))

    @property
    def slots(self) -> frozenset[Slot]:
        """The slots that this scheme fills."""
        return frozenset(SLOTS[name] for name in self.methods)

    @property
    def frequency_owner(self) -> Scheme | None:
        """The part whose frequencies replace the checkpoint's own; None if the checkpoint's stay, refined or not, or if
        nothing rotates any more.
        """
        return self if "frequencies" in self.slots and not (self.refines or self.stills) else None

    @property
    def brings_bias(self) -> bool:
        """Whether the scheme has a bias that carries positions, so that it replaces the checkpoint's own rotation or
        bias.
        """
        return "bias" in self.slots and not self.only_masks

    @property
    def is_table(self) -> bool:
        """Whether the positions of the scheme can be the rows of a table."""
        return type(self).rows is not Scheme.rows

    @property
    def learns(self) -> bool:
        """Whether the scheme may bring learned parameters."""
        return type(self).parameters is not Scheme.parameters

    def parts(self) -> tuple[Scheme, ...]:
        """The schemes of a composition; a plain scheme is its own only part."""
        return (self,)

    def of_layers(self, kinds: Mapping[int, str], num_layers: int) -> dict[int, Scheme | None]:
        """The scheme of each layer, by its index; None for a layer that stays unchanged.

        Args:
            kinds: index and type, such as `full_attention`, of the layers that attend.
            num_layers: number of layers in the stack, with those that do not attend.

        Raises:
            InvalidField: layers of this stack are chosen twice, or not at all, or do not exist.
            SlotConflict: two schemes of one layer own the same slot.
        """
        return dict.fromkeys(kinds, self)

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        """Fill in the defaults that depend on the `checkpoint`.

        Raises:
            InvalidField: a field does not fit this checkpoint.
        """
        return self

    def fields(self) -> dict[str, Any]:
        """Field names and values, as plain JSON types."""
        return {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        }

    def to_dict(self) -> dict[str, Any]:
        """Convert the scheme to `{"name": ..., **fields}`, which `scheme_from_dict` reads back."""
        return {"name": self.name, **self.fields()}

    def __str__(self) -> str:
        values = ",".join(f"{key}={value}" for key, value in self.fields().items() if value is not None)
        return f"{self.name}:{values}" if values else self.name


SLOTS: dict[str, Slot] = {
    "frequencies": "frequencies",
    "refine": "frequencies",
    "segments": "segments",
    "query_scale": "query_scale",
    "bias": "bias",
    "content_bias": "bias",
    "running_bias": "bias",
    "weight_factor": "values",
    "relative_values": "values",
    "embedding": "embedding",
}
"""The slot of the equation that each method fills."""

TRAINING: dict[Regime, str] = {
    "training-free": "none needed",
    "fine-tune": "fine-tuning needed",
    "from-scratch": "needed from scratch",
}
"""The training that a pretrained checkpoint needs, in words."""

COMPOSED: dict[str, Composed] = {
    name: rule
    for name, hint in get_type_hints(Scheme, include_extras=True).items()
    for rule in getattr(get_args(hint)[0], "__metadata__", ())
}
"""The rules for class attributes that a composition derives from its parts."""


def _plain(value: Any) -> Any:
    if isinstance(value, Scheme):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
