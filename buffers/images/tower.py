"""What a model makes of the images of a prompt: the vectors that stand in their places, and how positions turn behind them.

Engine and learner compute a prompt with images as transformers does, in two steps: the tower (everything of the model but its
decoder and output layer) makes a vector for each place, and the decoder reads them between the embeddings of text. Places are
the tokens of `place_id` inside the prompt. Here torch is at home; the arrays come from `processor`.

Axes: P tokens of a prompt, n places in it, D width, K texts or rows of a pass, T their length.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from async_rlhf.buffers.errors import RecordError
from async_rlhf.buffers.images.processor import FEATURES_BYTES, ImageProcessor
from async_rlhf.buffers.images.store import ImageStore

_PROMPTS, _COUNTED = 256, 1 << 16
# Families whose tokens of one image see each other, also those behind them.
_BIDIRECTIONAL = frozenset(("gemma3",))


@dataclass(frozen=True)
class ImageFeatures:
    """Of a prompt's images together."""

    vectors: Tensor
    """[n, D]: what stands in the places of the prompt, in their order."""
    deeper: tuple[Tensor, ...] = ()
    """[n, D] each: what is added there behind the first layers of the decoder, one after the other."""

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (self.vectors, *self.deeper))


@dataclass(frozen=True)
class PromptPlace:
    """A prompt with images in a pass, by row and column of its first token; or what of it stands behind a text."""

    row: int
    column: int
    ids: tuple[int, ...]
    images: tuple[str, ...]


class ImageTower:
    """Of a transformers model of images and text, whose tower is not trained unless `trains`.

    Owns the features of images that were last read, at most `cache_bytes`; `forget` drops them when the tower changes.
    """

    def __init__(
        self, model: Any, processor: ImageProcessor, cache_bytes: int = FEATURES_BYTES, *, trains: bool = False
    ) -> None:
        self.model, self.processor, self.trains = model, processor, trains
        self._most_bytes = cache_bytes
        self._known: OrderedDict[tuple[str, ...], ImageFeatures] = OrderedDict()
        self._base = model.base_model
        self.turns = hasattr(self._base, "get_rope_index")
        self.is_bidirectional = model.config.model_type in _BIDIRECTIONAL
        self._turn_of = lru_cache(_PROMPTS)(self._turn)  # which each completion of a prompt asks for
        self.num_patches = lru_cache(_COUNTED)(processor.num_patches)
        self.num_read = 0  # prompts whose images went through the tower

    @classmethod
    def of(cls, model: Any, directory: Path, images: Path | None, *, trains: bool = False) -> ImageTower | None:
        """For a model that was loaded from a directory, and the images of a store; None where prompts have none. Raises
        ConfigError as `ImageProcessor`."""
        return None if images is None else cls(model, ImageProcessor(directory, ImageStore(images)), trains=trains)

    @property
    def place_id(self) -> int:
        return self.processor.place_id

    @property
    def sample(self) -> PromptPlace:
        """The processor's, at the beginning of a text."""
        ids, images = self.processor.sample
        return PromptPlace(0, 0, tuple(ids), images)

    def forget(self) -> None:
        """The tower has other weights now."""
        self._known.clear()

    def features(self, images: tuple[str, ...]) -> ImageFeatures:
        """With a gradient where the tower trains and gradients are on; else from one pass of the tower."""
        if self.trains and torch.is_grad_enabled():
            return self._read(images)
        if images not in self._known:
            with torch.no_grad():
                self._known[images] = self._read(images)
        self._known.move_to_end(images)
        while len(self._known) > 1 and sum(each.num_bytes for each in self._known.values()) > self._most_bytes:
            self._known.popitem(last=False)
        return self._known[images]

    def _read(self, images: tuple[str, ...]) -> ImageFeatures:
        self.num_read += 1
        found = self.model.get_image_features(**self._inputs(images), return_dict=True)
        pooled = found.pooler_output
        vectors = torch.cat(list(pooled)) if isinstance(pooled, tuple | list) else pooled.flatten(0, -2)
        deeper = tuple(torch.cat(list(layer)) for layer in getattr(found, "deepstack_features", None) or ())
        return ImageFeatures(vectors, deeper)

    def _inputs(self, images: tuple[str, ...]) -> dict[str, Tensor]:
        device = self.model.device
        return {name: torch.from_numpy(each).to(device) for name, each in self.processor.inputs(images).items()}

    def positions(self, ids: Sequence[int], images: tuple[str, ...]) -> tuple[Tensor | None, int]:
        """int64 [3, P]: the rotary positions of a prompt, None for those of any text; and by how much they differ from its
        index at a token behind it."""
        if not images or not self.turns:
            return None, 0
        return self._turn_of(tuple(ids), images)

    def _turn(self, ids: tuple[int, ...], images: tuple[str, ...]) -> tuple[Tensor, int]:
        places = self._places(torch.tensor([ids]))
        grid = torch.from_numpy(self.processor.inputs(images)["image_grid_thw"])
        found, shift = self._base.get_rope_index(torch.tensor([ids]), places.int(), image_grid_thw=grid)
        return found[:, 0], int(shift)

    def _places(self, ids: Tensor) -> Tensor:
        return ids == self.place_id

    def embedded(self, ids_KT: Tensor, prompts: Sequence[PromptPlace], embedding: Any = None) -> dict[str, Any]:
        """The decoder's arguments for the tokens of a pass, int64 [K, T]: their embeddings, with those of images where the
        prompts have places. prompts: in the order of rows and columns. embedding: that of another decoder."""
        is_place = torch.zeros_like(ids_KT, dtype=torch.bool)
        known: dict[tuple[str, ...], ImageFeatures] = {}  # which a row each of a prompt's completions shares
        read = []
        for each in prompts:
            own = self._places(ids_KT[each.row, each.column : each.column + len(each.ids)])
            features = known[each.images] = known.get(each.images) or self.features(each.images)
            if int(own.sum()) != len(features.vectors):
                count = len(features.vectors)
                raise RecordError(
                    f"a prompt has {int(own.sum())} places of images, and its images fill {count}: whoever wrote it prepares "
                    "images otherwise"
                )
            is_place[each.row, each.column : each.column + len(each.ids)] = own
            read.append(features)
        embed = embedding or self.model.get_input_embeddings()
        # Of some families the token of a place has no embedding.
        vectors = embed(ids_KT.masked_fill(is_place, 0))
        if not read:
            return {"inputs_embeds": vectors}
        images = torch.cat([each.vectors for each in read]).to(vectors)
        arguments: dict[str, Any] = {"inputs_embeds": vectors.masked_scatter(is_place[..., None], images)}
        if read[0].deeper:
            deeper = [torch.cat(layer) for layer in zip(*(each.deeper for each in read), strict=True)]
            arguments |= {"visual_pos_masks": is_place, "deepstack_visual_embeds": deeper}
        return arguments

    def turned(self, positions_KT: Tensor, prompts: Sequence[PromptPlace], behind: Sequence[int]) -> Tensor:
        """Rotary positions of a pass, [3, K, T] or [K, T], from each token's index in its text. behind: of each prompt, the
        column up to which tokens follow it in its row."""
        if not self.turns or not prompts:
            return positions_KT
        turned = positions_KT.expand(3, *positions_KT.shape).clone()
        for each, end in zip(prompts, behind, strict=True):
            found, shift = self.positions(each.ids, each.images)
            if found is not None:
                after = each.column + len(each.ids)
                before = positions_KT[each.row, each.column]  # of text that a group shares
                turned[:, each.row, each.column : after] = before + found.to(turned.device)
                turned[:, each.row, after:end] += shift
        return turned

    def together(self, ids_KT: Tensor, prompts: Sequence[PromptPlace]) -> Tensor | None:
        """int64 [K, T]: which image a token is a place of, that sees all of its own; -1 for none. None where none do."""
        if not self.is_bidirectional or not prompts:
            return None
        found = torch.full_like(ids_KT, -1)
        for each in prompts:
            part = slice(each.column, each.column + len(each.ids))
            own = self._places(ids_KT[each.row, part])
            begins = own & ~torch.nn.functional.pad(own, (1, 0))[:-1]
            number = begins.int().cumsum(0) + int(found[each.row].max())
            found[each.row, part] = torch.where(own, number.to(found), -1)
        return found

    def logits(self, ids: Tensor, prompt: PromptPlace) -> Tensor:
        """[T, V] of one text, int64 [T], that begins with a prompt, from what is kept of its images; those of one image do not
        see each other."""
        at = self.turned(torch.arange(len(ids), device=ids.device)[None], [prompt], [len(ids)])
        read = self.model.get_decoder()(**self.embedded(ids[None], [prompt]), position_ids=at, use_cache=False)
        found: Tensor = self.model.get_output_embeddings()(read.last_hidden_state[0])
        return found

    @torch.no_grad()
    def plain(self, ids: Sequence[int], prompt: int, images: tuple[str, ...]) -> Tensor:
        """[T, V]: logits of one text from a pass of transformers' own over it and its images; prompt: tokens of it. The text
        behind it has no token of an image."""
        row = torch.tensor([list(ids)], device=self.model.device)
        of_image = self._places(row).int()
        of_image[:, prompt:] = 0
        takes = inspect.signature(self.model.forward).parameters
        kinds = {name: of_image for name in ("token_type_ids", "mm_token_type_ids") if name in takes}
        logits: Tensor = self.model(input_ids=row, use_cache=False, **kinds, **self._inputs(images)).logits[0]
        if self.turns:
            self._base.rope_deltas = None  # which it keeps for a next pass
        return logits


def tower_parameters(model: Any) -> dict[str, Tensor]:
    """The parameters of a model of images and text that are neither its decoder's nor its output layer's, by name; none of
    another."""
    if not hasattr(model.config, "vision_config"):
        return {}
    own = {id(each) for part in (model.get_decoder(), model.get_output_embeddings()) for each in part.parameters()}
    return {name: each for name, each in model.named_parameters() if id(each) not in own}
