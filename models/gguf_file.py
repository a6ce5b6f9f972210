"""A GGUF file of llama.cpp: weights dequantised one at a time, everything else from its metadata. Imports no jax."""

from __future__ import annotations

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from gguf import quants
from numpy.typing import NDArray

from jetserve import gguf_header
from jetserve.errors import CheckpointError
from jetserve.gguf_header import TensorInfo
from jetserve.models import gguf_config
from jetserve.models.spec import Family, ModelConfig
from jetserve.models.stored_tensors import StoredTensor, check_tensors, parameters

_PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
QUANTISED_TYPES = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
_READABLE = (*_PLAIN, *QUANTISED_TYPES)
# Not weights: llama3 rope scaling (the configuration holds it) and a rope table of old files.
_NOT_WEIGHTS = (gguf_config.ROPE_FREQUENCIES, "attn_rot_embd.weight")
# Tables of "longrope" scaling, which would change every angle.
_LONG_ROPE = ("rope_factors_long.weight", "rope_factors_short.weight")
# Elements dequantised at a time: small enough for the cache. SmolLM2-135M takes 0.4 s so, 0.9 s row by row.
CHUNK_ELEMENTS = 1 << 18


class GgufFile:
    """Weights of one file, checked when opened, read one at a time.

    Attributes:
      path: the file.
      config: what its metadata and tensor shapes say.
    """

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises: CheckpointError naming the key or all tensors at fault."""
        self.path = path
        self._header = gguf_header.read_header(path)
        divisors = self._header.tensors.get(gguf_config.ROPE_FREQUENCIES)
        if divisors is not None:
            self._check_within_file(gguf_config.ROPE_FREQUENCIES)
        plain = None if divisors is None else self._load(divisors, heads=0).astype(np.float32)
        self.config: ModelConfig = gguf_config.read_config(path, self._header, plain)
        self.check()

    def read(self, name: str, layer: int | None) -> NDArray[np.generic]:
        """The parameter, in float32 if it is stored quantised, else in its own dtype, perhaps mapped from the file."""
        values = self._load(self._header.tensors[_stored_name(name, layer)], self._interleaved_heads(name))
        if name.endswith("norm") and self.config.norm_offset:
            # llama.cpp stores 1 + w of Gemma's norms.
            return np.asarray(values.astype(np.float32) - np.float32(self.config.norm_offset))
        return values

    def check(self) -> None:
        """Compares the file with what the model needs. Raises: CheckpointError that names all differences."""
        tensors = {n: info for n, info in self._header.tensors.items() if not n.endswith(_NOT_WEIGHTS)}
        unsupported = [name for name in _LONG_ROPE if name in tensors]
        if unsupported:
            raise CheckpointError(f"{self.path} holds {', '.join(unsupported)}: longrope scaling is not supported")
        wanted = {_stored_name(p.name, p.layer): p.spec.shape for p in parameters(self.config)}
        stored = {name: StoredTensor(info.shape, _type_name(info)) for name, info in tensors.items()}
        check_tensors(self.path, stored, wanted, _READABLE)
        for name in wanted:
            self._check_within_file(name)

    def tokenizer_source(self) -> Path:
        """Where `jetserve.tokenizer` finds the vocabulary: the file itself."""
        return self.path

    def _interleaved_heads(self, name: str) -> int:
        """Heads whose rows llama.cpp's converter interleaved; 0 for none.

        For the "llama" architecture it turns the halves of each head, which rotate together, into neighbours. Keys have
        their own number of heads.
        """
        if self.config.family is not Family.LLAMA:
            return 0
        heads = {"q": self.config.num_heads, "k": self.config.num_kv_heads}
        return heads.get(name[0], 0) if name in ("q_proj", "k_proj", "q_bias", "k_bias") else 0

    def _load(self, info: TensorInfo, heads: int) -> NDArray[np.generic]:
        # Mapped for this tensor alone: a mapping that stays open keeps all it ever touched in our resident memory.
        type_name = _type_name(info)
        data = np.memmap(self.path, np.uint8, "r", offset=info.offset, shape=(_stored_bytes(info),))
        rows = data.reshape(info.shape[0], -1)
        if heads:
            # Rows are whole blocks, so they can be moved before they are dequantised.
            rows = rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
        if type_name in _PLAIN:
            return np.asarray(rows.view(_PLAIN[type_name]).reshape(info.shape))
        return dequantise(rows.reshape(-1), gguf.GGMLQuantizationType(info.type_id)).reshape(info.shape)

    def _check_within_file(self, name: str) -> None:
        info, size = self._header.tensors[name], self.path.stat().st_size
        end = info.offset + _stored_bytes(info)
        if end > size:
            raise CheckpointError(
                f"{self.path} is truncated: tensor {name} ends at byte {end}, the file at {size}; get it again"
            )


def _stored_name(name: str, layer: int | None) -> str:
    if layer is None:
        return gguf_config.MODEL_NAMES[name]
    return gguf_config.LAYER_NAMES[name].format(layer=layer)


def _type_name(info: TensorInfo) -> str:
    try:
        return gguf.GGMLQuantizationType(info.type_id).name
    except ValueError:
        return f"type {info.type_id}"


def _stored_bytes(info: TensorInfo) -> int:
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.type_id)]
    return int(np.prod(info.shape)) // block_elements * block_bytes


def dequantise(data: NDArray[np.uint8], quantisation: gguf.GGMLQuantizationType) -> NDArray[np.float32]:
    """Dequantises whole blocks: u8[bytes] -> f32[elements]."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    blocks = data.reshape(-1, block_bytes)
    out = np.empty((blocks.shape[0], block_elements), np.float32)
    step = max(1, CHUNK_ELEMENTS // block_elements)
    for start in range(0, blocks.shape[0], step):
        part = blocks[start : start + step]
        # As one long row: the package works on groups of 16 rows.
        out[start : start + step] = quants.dequantize(part.reshape(1, -1), quantisation).reshape(-1, block_elements)
    return out.reshape(-1)
