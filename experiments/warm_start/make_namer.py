"""Makes the tiny model of images and text that ships with the project, and the drawings it is asked about, in minutes.

    python -m async_rlhf.experiments.warm_start.make_namer [--out DIR] [--rows FILE]

As in larger ones, its parts are made apart. What sees learns to tell drawings apart, by a classifier that is thrown away; what
speaks learns to answer with a colour and a shape, by drawings that have nothing to do with them. Which word is for what is seen
is left to reinforcement. Seeded: the same machine and library versions give the same weights. Called by hand; nothing imports
it but tests.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
import typer
from PIL import Image, ImageDraw

from async_rlhf.buffers.images.processor import ImageProcessor
from async_rlhf.buffers.images.store import scratch
from async_rlhf.buffers.images.tower import ImageTower, PromptPlace
from async_rlhf.experiments.warm_start.make_model import WarmStart, descend

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (230, 200, 40)}
SHAPES = ("circle", "square", "triangle", "cross")
SIDE, PATCH, WIDTH = 24, 6, 64
"""Pixels of a drawing and of what the model sees as one; numbers of a hidden state."""
QUESTION = "What is it?"
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
_PAD, _END, _UNKNOWN = "<pad>", "<eos>", "<unk>"
_MARKS = {
    "image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}  # fmt: skip


class Drawing(NamedTuple):
    """A shape somewhere on a light ground, as a PNG, and what is right to say of it."""

    png: bytes
    answer: str


def draw(random: Random) -> Drawing:
    """Place, size, shade and ground vary; colour and shape are each equally likely."""
    colour, shape = random.choice([*COLOURS]), random.choice(SHAPES)
    ground, fill = (
        tuple(min(255, max(0, each + random.randint(-20, 20))) for each in c) for c in ((235,) * 3, COLOURS[colour])
    )
    size = random.randint(11, 15)
    left, top = ((SIDE - size) // 2 + random.randint(-3, 3) for _ in range(2))
    right, low, third = left + size, top + size, size // 3
    image = Image.new("RGB", (SIDE, SIDE), ground)
    pen = ImageDraw.Draw(image)
    if shape == "circle":
        pen.ellipse((left, top, right, low), fill=fill)
    elif shape == "square":
        pen.rectangle((left, top, right, low), fill=fill)
    elif shape == "triangle":
        pen.polygon([(left, low), (right, low), ((left + right) // 2, top)], fill=fill)
    else:
        pen.rectangle((left + third, top, right - third, low), fill=fill)
        pen.rectangle((left, top + third, right, low - third), fill=fill)
    file = io.BytesIO()
    image.quantize(8).save(file, "PNG", optimize=True)
    return Drawing(file.getvalue(), f"{colour} {shape}")


def rows(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Rows of a data set; no two drawings are equal."""
    random, seen = Random(seed), set[bytes]()
    while len(seen) < count:
        drawing = draw(random)
        if drawing.png not in seen:
            seen.add(drawing.png)
            url = f"data:image/png;base64,{base64.b64encode(drawing.png).decode()}"
            yield {"prompt": QUESTION, "image": url, "answer": drawing.answer}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word, and for each character of one, so that none is unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*COLOURS, *SHAPES, "What", "is", "it", "?"]
    tokens = dict.fromkeys([_PAD, _END, _UNKNOWN, *_MARKS.values(), *words, *sorted({*"".join(words)})])
    known = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made: PreTrainedTokenizerFast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_END, unk_token=_UNKNOWN, model_max_length=128,
        clean_up_tokenization_spaces=False, padding_side="left", additional_special_tokens=[*_MARKS.values()],
        extra_special_tokens=_MARKS, chat_template=TEMPLATE,
    )  # fmt: skip
    return made


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int, width: int = WIDTH) -> PreTrainedModel:
    """A float32 Idefics 3 with random weights drawn from `seed`; sets the global torch generator."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    torch.manual_seed(seed)
    heads = {"num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 2 * width, "hidden_size": width}
    text = {
        "model_type": "llama", "vocab_size": len(tokenizer), "num_key_value_heads": 4, "max_position_embeddings": 128,
        "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    config = Idefics3Config(
        text_config=heads | text,
        vision_config=heads | {"image_size": SIDE, "patch_size": PATCH, "initializer_range": 0.1},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        tie_word_embeddings=False,
        dtype="float32",
    )
    made: PreTrainedModel = Idefics3ForConditionalGeneration(config)
    return made


def make_processor(out: Path) -> Any:
    """Write what prepares images."""
    from transformers import Idefics3ImageProcessorPil

    images = Idefics3ImageProcessorPil(
        size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
    )
    images.save_pretrained(out)
    (out / "processor_config.json").write_text(json.dumps({"image_seq_len": (SIDE // PATCH // 2) ** 2}) + "\n")


def see(tower: ImageTower, config: WarmStart, random: Random) -> Iterator[tuple[int, float]]:
    """Train what reads images to tell colours and shapes apart; gives the number of updates done, and the loss."""
    answers = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
    classifier = torch.nn.Linear((SIDE // PATCH // 2) ** 2 * WIDTH, len(answers))

    def loss_of(_: int) -> torch.Tensor:
        drawings = [draw(random) for _ in range(config.batch)]
        images = tuple(scratch().add(each.png) for each in drawings)
        arrays = {name: torch.from_numpy(each) for name, each in tower.processor.inputs(images).items()}
        vectors = tower.model.get_image_features(**arrays, return_dict=True).pooler_output.flatten(1)
        right = torch.tensor([answers.index(each.answer) for each in drawings])
        return torch.nn.functional.cross_entropy(classifier(vectors), right)

    yield from descend(torch.nn.ModuleList([tower.model, classifier]), config, loss_of)


def speak(tower: ImageTower, config: WarmStart, random: Random) -> Iterator[tuple[int, float]]:
    """Train what writes to say a colour and a shape, whatever it sees; gives the same."""
    model, tokenizer = tower.model, make_tokenizer()
    images = [(scratch().add(draw(random).png),) for _ in range(config.batch)]
    parts = [{"type": "image", "image": images[0][0]}, {"type": "text", "text": QUESTION}]
    prompt = tower.processor.encode([{"role": "user", "content": parts}], {}).ids

    def loss_of(_: int) -> torch.Tensor:
        said = [f"{random.choice([*COLOURS])} {random.choice(SHAPES)}" for _ in range(config.batch)]
        ids = torch.tensor([[*prompt, *tokenizer(each)["input_ids"], tokenizer.eos_token_id] for each in said])
        places = [PromptPlace(row, 0, tuple(prompt), random.choice(images)) for row in range(config.batch)]
        hidden = model.get_decoder()(**tower.embedded(ids[:, :-1], places), use_cache=False).last_hidden_state
        logits = model.get_output_embeddings()(hidden[:, len(prompt) - 1 :])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, len(prompt) :].flatten())

    yield from descend(torch.nn.ModuleList([model.get_decoder(), model.get_output_embeddings()]), config, loss_of)


def main(
    out: Annotated[Path, typer.Option(help="Directory the model is written to.")] = Path("configs/models/tiny-namer"),
    to: Annotated[Path, typer.Option("--rows", help="File the drawings are written to.")] = Path(
        "configs/shapes/drawings.jsonl"
    ),
    count: Annotated[int, typer.Option(help="Drawings.")] = 1200,
    seen: Annotated[int, typer.Option(help="Updates of what sees, of 64 drawings each.")] = 1500,
    said: Annotated[int, typer.Option(help="Updates of what speaks, of 64 answers each.")] = 200,
) -> None:
    """Make the tiny namer and its drawings, and write them."""
    torch.set_num_threads(1)
    tokenizer, random = make_tokenizer(), Random(0)
    model = make_model(tokenizer, 0)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    make_processor(out)
    tower = ImageTower(model, ImageProcessor(out, scratch()))
    for what, part, updates in (("sees", see, seen), ("speaks", speak, said)):
        for done, loss in part(tower, WarmStart(batch=64, updates=updates, warmup=20), random):
            if done % 100 == 0:
                typer.echo(f"{what}  {done:>6}/{updates} updates  loss {loss:.3f}")
    model.save_pretrained(out)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text("".join(json.dumps(row) + "\n" for row in rows(count, seed=1)))
    typer.echo(f"wrote {out} ({sum(p.numel() for p in model.parameters()):,} parameters) and {to}")


if __name__ == "__main__":
    typer.run(main)
