"""Reading of a Hugging Face folder of the Llama family: every tensor's name, shape and dtype is checked."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.config import ModelConfig
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.model import abstract_params
from hlat_jax.store.array_reading import Bounds, read_parts
from hlat_jax.store.typed_json import check_name, read_json
from hlat_jax.weights import hf_names, path_checks
from hlat_jax.weights.hf_config import model_config, unknown_fields
from hlat_jax.weights.safetensors_file import DTYPES, StoredTensor, bits, read_header

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
# Files that are copied along with the weights.
COMPANIONS = (
    *("config.json", "generation_config.json", "tokenizer.model", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
)
_NATIVE, _JSON = "tokenizer.model", "tokenizer.json"  # the native one is preferred: it needs no extra package
_SHOWN = 8  # names in an error


@dataclasses.dataclass(frozen=True)
class HFCheckpoint:
    """A folder whose tensors match its config.json.

    Attributes:
      dtype: of our parameters.
      notes: lines on ignored tensors.
      warning: a line on the unknown fields of config.json; "" without any.
    """

    folder: pathlib.Path
    model: ModelConfig
    tensors: dict[str, StoredTensor]
    dtype: np.dtype
    notes: tuple[str, ...]
    warning: str

    def companions(self) -> list[pathlib.Path]:
        """Returns the files to copy along with the weights."""
        return [self.folder / name for name in COMPANIONS if (self.folder / name).is_file()]

    def slabs(self, entry: hf_names.ParamMapping) -> Iterator[np.ndarray]:
        """Yields one of our parameters, layer by layer where it is stacked, in `dtype`."""
        for layer in range(self.model.num_layers if entry.stacked else 1):
            yield self._slab(entry, layer)

    def arrays(self) -> Any:
        """Returns shape and dtype of our parameters, as nested dicts."""
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, self.dtype), abstract_params(self.model))

    def read_param(self, name: str, abstract: jax.ShapeDtypeStruct) -> Any:
        """Returns a parameter by its path as NumPy array, or, where `abstract` has a sharding, as a jax array.

        Reads the layers that this process needs, each once, whatever the number of its devices.
        """
        [entry] = [entry for entry in hf_names.table(self.model) if entry.leaf == name]

        def fill(parts: dict[Bounds, np.ndarray]) -> None:
            for layer in range(self.model.num_layers if entry.stacked else 1):
                wanted = {box: part for box, part in parts.items() if not entry.stacked or layer in range(*box[0])}
                if not wanted:
                    continue
                slab = as_dtype(self._slab(entry, layer), abstract.dtype)
                for limits, part in wanted.items():
                    rows = [slice(*limit) for limit in limits[entry.stacked :]]
                    bits(part[layer - limits[0][0]] if entry.stacked else part)[...] = bits(slab)[tuple(rows)]

        return read_parts(abstract, fill)

    def _slab(self, entry: hf_names.ParamMapping, layer: int) -> np.ndarray:
        tensors = [as_dtype(self.tensors[name].read(), self.dtype) for name in entry.names(layer)]
        return entry.join([bits(tensor) for tensor in tensors]).view(self.dtype)

    def tokenizer_file(self) -> str:
        """Returns the name of the folder's tokenizer file; "" if there is none.

        Tokens that were added to a native one, and that the model has rows for, are only in tokenizer.json.
        """
        present = [name for name in (_NATIVE, _JSON) if (self.folder / name).is_file()]
        if len(present) < 2:
            return "".join(present)
        added = added_tokens(self.folder)
        try:
            known = Tokenizer(str(self.folder / _NATIVE)).has_tokens(added)
        except ValueError:  # of another kind than SentencePiece
            return _JSON
        return _NATIVE if known or max(added) >= self.model.vocab_size else _JSON


class _Index(TypedDict):
    weight_map: dict[str, str]


def is_hugging_face(folder: pathlib.Path) -> bool:
    """Returns whether a folder has Hugging Face weights, or a config.json of one of their models."""
    if (folder / INDEX_FILE).is_file() or any(folder.glob("*.safetensors")):
        return True
    try:  # a run folder has a config.json too
        return not {"model_type", "architectures"}.isdisjoint(_json_if_there(folder / "config.json"))
    except ValueError:  # damaged, and no weights beside it
        return False


def open_checkpoint(
    folder: pathlib.Path, *, dtype: str = "", fuse_qkv: bool = True, strict: bool = False
) -> HFCheckpoint:
    """Returns a folder's model and tensors; reads no weights.

    Args:
      folder: with config.json and safetensors, one file or several with an index.
      dtype: of our parameters; "": that of the tensors, with float16 as float32, which is exact.
      fuse_qkv: as ModelConfig's.
      strict: raise for unknown fields of config.json.

    Raises:
      ValueError: a tensor that is missing, left over, or of another shape or dtype; an unsupported architecture.
    """
    path = folder / "config.json"
    path_checks.check_hugging_face(folder)
    found = read_json(path)
    model = model_config(found, where=str(path), fuse_qkv=fuse_qkv)
    unknown = unknown_fields(found)
    if unknown and strict:
        raise ValueError(
            f"{path}: {', '.join(f'{key}={found[key]!r}' for key in unknown)} are unknown to this converter "
            "and may change the computation; without --strict they are kept and ignored."
        )
    warning = f"{path}: {', '.join(unknown)} are unknown to this converter and assumed to change no result."
    tensors = _tensors(folder)
    notes = []
    derived = [name for name in tensors if name.endswith(hf_names.DERIVED)]
    if derived:
        notes.append(f"{len(derived)} tables {hf_names.DERIVED} are ignored: they follow from config.json.")
    tensors = {name: stored for name, stored in tensors.items() if name not in derived}
    if model.tie_embeddings and hf_names.HEAD in tensors and hf_names.EMBEDDING in tensors:
        _require_same(tensors[hf_names.EMBEDDING], tensors.pop(hf_names.HEAD))
    if model.num_layers > len(tensors):  # before their names are listed
        raise ValueError(
            f"{path}: num_hidden_layers={model.num_layers}, but the folder has only {len(tensors)} tensors."
        )
    _require_names(tensors, hf_names.expected(model), folder=folder)
    kept = _dtype(tensors, dtype, folder=folder)
    return HFCheckpoint(folder, model, tensors, kept, tuple(notes), warning if unknown else "")


def as_dtype(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the values rounded to a dtype, to nearest; the same array where the dtype is equal."""
    return values if values.dtype == dtype else values.astype(dtype)


def _tensors(folder: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns every tensor of the folder; the index and the files must agree."""
    index = folder / INDEX_FILE
    if not index.is_file():
        if (folder / SINGLE_FILE).is_file():
            return read_header(folder / SINGLE_FILE)
        others = sorted(path.name for path in folder.glob("*.bin")) or ["no weights"]
        raise ValueError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}, only {_some(others)}; fetch the safetensors or save "
            "the model again with transformers, which writes them."
        )
    where = read_json(index, kind=_Index)["weight_map"]
    found: dict[str, StoredTensor] = {}
    files = {check_name(name, f"{index}: weight_map[{repr(tensor)[:100]}]") for tensor, name in where.items()}
    for name in sorted(files):
        if not (folder / name).is_file():
            raise ValueError(f"{index} names the file {name}, which is missing; fetch it.")
        for tensor, stored in read_header(folder / name).items():
            if tensor in found:
                raise ValueError(f"{folder}: tensor {_some([tensor])} is in {found[tensor].path.name} and in {name}.")
            found[tensor] = stored
    actual = {name: stored.path.name for name, stored in found.items()}
    misplaced = {name for name, _ in actual.items() ^ where.items()}
    if misplaced:
        raise ValueError(f"{index} and its files disagree on {_some(sorted(misplaced))}; fetch them again.")
    return found


def _require_names(
    found: dict[str, StoredTensor], expected: dict[str, tuple[int, ...]], *, folder: pathlib.Path
) -> None:
    left_over = [name for name in found if name not in expected]
    missing = [name for name in expected if name not in found]
    if left_over or missing:
        lines = [f"{len(missing)} missing: {_some(missing)}"] if missing else []
        lines += [f"{len(left_over)} left over: {_some(left_over)}"] if left_over else []
        if missing == [hf_names.HEAD]:
            lines.append("without it, config.json should say tie_word_embeddings=true")
        raise ValueError(f"{folder} does not have the tensors of its config.json:\n  " + "\n  ".join(lines))
    others = [
        f"{name} is {list(found[name].shape)}, config.json makes it {list(shape)}"
        for name, shape in expected.items()
        if found[name].shape != shape
    ]
    if others:
        raise ValueError(f"{folder} has {len(others)} tensors of another shape:\n  " + "\n  ".join(others[:_SHOWN]))


def _dtype(tensors: dict[str, StoredTensor], asked: str, *, folder: pathlib.Path) -> np.dtype:
    by_code: dict[str, list[str]] = {}
    for name, stored in tensors.items():
        by_code.setdefault(stored.code, []).append(name)
    for code in by_code.keys() - DTYPES.keys():
        raise ValueError(
            f"{folder}: tensor {by_code[code][0]} and {len(by_code[code]) - 1} others are {code}; supported are "
            f"{', '.join(DTYPES)}."
        )
    if asked:
        return np.dtype(jnp.dtype(asked))
    if len(by_code) > 1:
        kinds = ", ".join(f"{len(those)} {code} such as {those[0]}" for code, those in sorted(by_code.items()))
        raise ValueError(f"{folder} mixes dtypes: {kinds}; import it with --dtype=float32 or --dtype=bfloat16.")
    [code] = by_code
    return DTYPES["F32"] if code == "F16" else DTYPES[code]


def _require_same(embedding: StoredTensor, head: StoredTensor) -> None:
    """Raises ValueError unless the head, of a model with tied embeddings, equals the embedding."""
    same = (embedding.code, embedding.shape) == (head.code, head.shape)
    step = max(1, (1 << 26) // max(1, embedding.shape[-1]))
    starts = range(0, embedding.shape[0], step) if same else ()
    same = same and all(
        np.array_equal(*(bits(each.read(rows=slice(start, start + step))) for each in (embedding, head)))
        for start in starts
    )
    if not same:
        raise ValueError(
            f"{head.path}: {hf_names.HEAD} differs from {hf_names.EMBEDDING}, but config.json has "
            "tie_word_embeddings=true; set it to false to keep both."
        )


def _some(found: Iterable[str]) -> str:
    found = list(found)
    shown = (name if name.isprintable() and len(name) < 100 else repr(name)[:100] for name in found[:_SHOWN])
    return ", ".join(shown) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def begins_texts_with_bos(folder: pathlib.Path) -> bool:
    """Returns whether transformers puts BOS before a text with the tokenizer of a folder, from its files.

    Raises:
      ValueError: a file is damaged; the message names it.
    """
    settings, path = _json_if_there(folder / "tokenizer_config.json"), folder / "tokenizer.json"
    if isinstance(settings.get("add_bos_token"), bool):
        return settings["add_bos_token"]
    if path.is_file():
        after = read_json(path).get("post_processor") or {}
        try:
            templates = [each.get("single") or [{}] for each in after.get("processors", [after])]
            return any("SpecialToken" in pieces[0] for pieces in templates)
        except (AttributeError, KeyError, TypeError):
            raise ValueError(f"{path}: its post_processor is {str(after)[:80]}; fetch that file again.") from None
    kind = settings.get("tokenizer_class")
    return isinstance(kind, str) and kind.startswith("Llama")  # its default


def ids_that_end_a_text(folder: pathlib.Path) -> tuple[int, ...]:
    """Returns the tokens at which transformers ends a generation: of generation_config.json, or else config.json.

    Raises:
      ValueError: a file is damaged, or has a value that is not a token id; the message names it.
    """
    path = folder / "generation_config.json"
    path = path if path.is_file() else folder / "config.json"
    named = read_json(path).get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if any(type(token) is not int for token in ids):
        raise ValueError(f"{path}: eos_token_id={named!r} must be a token id or a list of token ids.")
    return tuple(ids)


def added_tokens(folder: pathlib.Path) -> dict[int, str]:
    """Returns id -> text of the tokens that files beside a tokenizer add.

    Raises:
      ValueError: a file is damaged; the message names it.
    """
    of_texts = _json_if_there(folder / "added_tokens.json")
    settings = _json_if_there(folder / "tokenizer_config.json")
    of_ids = settings.get("added_tokens_decoder") or {}
    try:
        found = {int(token): text for text, token in of_texts.items()}
        return found | {int(token): content["content"] for token, content in of_ids.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"{folder}: added_tokens.json, or added_tokens_decoder in tokenizer_config.json, does not give each token "
            "an id; fetch both again."
        ) from None


def _json_if_there(path: pathlib.Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
