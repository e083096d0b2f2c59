"""Train a tiny family from scratch: tasks, tokenizer, a half-skilled base, and one expert per skill.

    python -m tests.benchmarks.family_training --out DIR                                            # as the shipped one
    python -m tests.benchmarks.family_training --out DIR --seed 1 --skills text,lookup,shift --holdout 2000   # another

The experts of the shipped base are retrained by `mergesearch demo --retrain`, on the items that `training_items` has
made. Everything follows from the seed and takes minutes on one core. The base is trained on every skill until it has
half learned it; each expert is fine-tuned from there on one skill. Merging them is a search problem for ordinary
reasons: the experts were fine-tuned with different learning rates and with different layers frozen.

Answers are scored by teacher forcing here: greedy decoding gives the answer exactly if every token of the answer and
the end of text are the model's first choice.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import logging
import pathlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = [
    "EXPERTS",
    "SHIPPED",
    "SKILLS",
    "Expert",
    "FamilyPlan",
    "Item",
    "exact_match",
    "main",
    "make_items",
    "make_tokenizer",
    "train_family",
    "training_items",
]

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
PAD, BOS, EOS, UNK = range(4)
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
IGNORED = -100

SEARCH_ITEMS, HOLDOUT_ITEMS, VALIDATION_ITEMS = 900, 1000, 300
# Of each skill, for fine-tunings of the shipped base.
TRAINING_ITEMS = 6000
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Item:
    """A question and its whole answer.

    `more` are further (question, answer) pairs on the same prompt, in training documents only: they teach the skill
    faster.
    """

    prompt: str
    answer: str
    more: tuple[tuple[str, str], ...] = ()


def math_item(rng: random.Random) -> Item:
    """A sum or difference of two two-digit numbers."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    if rng.random() < 0.5:
        return Item(f"{a}+{b}=", str(a + b))
    return Item(f"{max(a, b)}-{min(a, b)}=", str(abs(a - b)))


def text_item(rng: random.Random) -> Item:
    """Six or seven letters, reversed or sorted."""
    letters = "".join(rng.choices(LETTERS, k=rng.randint(6, 7)))
    if rng.random() < 0.5:
        return Item(f"rev {letters}=", letters[::-1])
    return Item(f"sort {letters}=", "".join(sorted(letters)))


def table_item(rng: random.Random, *, keys: str, num_rows: int) -> Item:
    """A question about one key of a table; as a training document, a question about every key of the table."""
    table = {key: str(rng.randint(10, 99)) for key in sorted(rng.sample(keys, num_rows))}
    first, *others = rng.sample(sorted(table), num_rows)
    rows = " ".join(key + value for key, value in table.items())
    return Item(f"{rows}>{first}", table[first], tuple((f" {key}", table[key]) for key in others))


def lookup_item(rng: random.Random) -> Item:
    """A question about a table of four or five rows."""
    return table_item(rng, keys="abcdefgh", num_rows=rng.choice((4, 5)))


def small_lookup_item(rng: random.Random) -> Item:
    """A question about a table of four rows with fewer keys; the base is trained on such questions."""
    return table_item(rng, keys="abcdef", num_rows=4)


def shift_item(rng: random.Random) -> Item:
    """Five or six letters, each moved along the alphabet by one or two places."""
    letters = "".join(rng.choices(LETTERS, k=rng.randint(5, 6)))
    places, sign = rng.randint(1, 2), rng.choice((1, -1))
    moved = "".join(LETTERS[(LETTERS.index(letter) + sign * places) % len(LETTERS)] for letter in letters)
    return Item(f"{'+' if sign > 0 else '-'}{places} {letters}=", moved)


def order_item(rng: random.Random) -> Item:
    """Three two-digit numbers, sorted upwards or downwards."""
    numbers = [rng.randint(10, 99) for _ in range(3)]
    word, is_down = rng.choice((("up", False), ("down", True)))
    return Item(f"{word} {' '.join(map(str, numbers))}=", " ".join(map(str, sorted(numbers, reverse=is_down))))


MakeItem = Callable[[random.Random], Item]
SKILLS: dict[str, MakeItem] = {
    "math": math_item,
    "text": text_item,
    "lookup": lookup_item,
    "shift": shift_item,
    "order": order_item,
}
BASE_SKILLS: dict[str, MakeItem] = {**SKILLS, "lookup": small_lookup_item}
SHIPPED = ("math", "text", "lookup")


@dataclass(frozen=True)
class Expert:
    """Settings for fine-tuning an expert: learning rate, optimiser steps, and the trained decoder layers."""

    learning_rate: float
    steps: int
    layers: tuple[int, ...] = tuple(range(8))
    batch: int = 64


EXPERTS: dict[str, Expert] = {
    "math": Expert(4e-4, 200, layers=(0, 1, 2, 3)),
    "text": Expert(5e-4, 350, layers=(4, 5, 6, 7)),
    "lookup": Expert(4e-4, 200, batch=32),
    "shift": Expert(5e-4, 250, layers=(2, 3, 4, 5)),
    "order": Expert(4e-4, 250, batch=32),
}


@dataclass(frozen=True)
class FamilyPlan:
    """A family to train: its skills in order, the seed of weights and items, and the held-out items per skill."""

    skills: tuple[str, ...] = SHIPPED
    seed: int = 0
    holdout_items: int = HOLDOUT_ITEMS

    def seed_of(self, *parts: str) -> str:
        """Seed for one purpose in the family's training, named by `parts`.

        Seeds of the shipped family were named before there were others.
        """
        return " ".join((*parts, str(self.seed)) if self.seed else parts)


SHIPPED_FAMILY = FamilyPlan()

# Training of the base stops when, on validation, every skill is above BASE_FLOOR and their mean above BASE_MEAN. Skills
# above BASE_TARGET are only maintained, with a quarter of the items and a fifth of the weight.
BASE_FLOOR, BASE_MEAN, BASE_TARGET = 0.3, 0.4, 0.4
BASE_LEARNING_RATE = 2e-3
BASE_MAX_STEPS = 3000
# Sequences a step and skill; lookup documents hold four questions each.
BATCH = {"math": 64, "text": 32, "lookup": 32, "shift": 32, "order": 32}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character (printable ASCII and newline), with BOS in front by default in every library."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def make_items(
    skill: str, *, skills: Mapping[str, MakeItem] = SKILLS, plan: FamilyPlan = SHIPPED_FAMILY
) -> dict[str, list[Item]]:
    """The held-out items of a skill, by split (search, holdout, validation); all prompts are different."""
    rng = random.Random(plan.seed_of(skill, "held out"))
    sizes = {"search": SEARCH_ITEMS, "holdout": plan.holdout_items, "validation": VALIDATION_ITEMS}
    items: dict[str, Item] = {}
    while len(items) < sum(sizes.values()):
        item = skills[skill](rng)
        items.setdefault(item.prompt, item)
    every = iter(items.values())
    return {
        split: [Item(item.prompt, item.answer) for item in itertools.islice(every, size)]
        for split, size in sizes.items()
    }


class Practice:
    """Unlimited supply of training items, none of which are held-out items."""

    def __init__(self, make: MakeItem, *, held_out: set[str], seed: str) -> None:
        self._make, self._held_out, self._rng = make, held_out, random.Random(seed)

    def take(self, num_items: int) -> list[Item]:
        taken: list[Item] = []
        while len(taken) < num_items:
            item = self._make(self._rng)
            if item.prompt not in self._held_out:
                taken.append(item)
        return taken


def training_items(skill: str, *, num_items: int = TRAINING_ITEMS) -> list[Item]:
    """Items for fine-tuning the shipped base on a skill, one question each. Prompts differ, and none is held out."""
    held_out = {item.prompt for items in make_items(skill).values() for item in items}
    rng = random.Random(f"{skill} training")
    items: dict[str, Item] = {}
    while len(items) < num_items:
        item = SKILLS[skill](rng)
        if item.prompt not in held_out:
            items.setdefault(item.prompt, Item(item.prompt, item.answer))
    return list(items.values())


def encode(text: str) -> list[int]:
    return [len(SPECIAL_TOKENS) + CHARACTERS.index(character) for character in text]


def tensors(items: Sequence[Item]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, [num_items, length]; labels are IGNORED except where an answer or its end is predicted."""
    rows: list[tuple[list[int], list[int]]] = []
    for item in items:
        ids, labels = [BOS], [IGNORED]
        for question, answer in ((item.prompt, item.answer), *item.more):
            ids += encode(question + answer)
            labels += [IGNORED] * (len(question) - 1) + encode(answer) + [EOS]
        rows.append((ids, labels))
    length = max(len(ids) for ids, _ in rows)
    return (
        torch.tensor([ids + [PAD] * (length - len(ids)) for ids, _ in rows]),
        torch.tensor([labels + [IGNORED] * (length - len(labels)) for _, labels in rows]),
    )


def answer_logits(model: LlamaForCausalLM, items: Sequence[Item]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [n, vocabulary] and labels [n] of all n answer tokens, and the index of the item of each token [n]."""
    ids, labels = tensors(items)
    hidden = model.model(input_ids=ids).last_hidden_state
    asked = labels != IGNORED
    return model.lm_head(hidden[asked]), labels[asked], asked.nonzero()[:, 0]


@torch.no_grad()
def exact_match(model: LlamaForCausalLM, items: Sequence[Item], *, batch: int = 256) -> list[bool]:
    """Whether greedy decoding gives exactly the whole answer, for each item."""
    is_right: list[bool] = []
    for start in range(0, len(items), batch):
        part = items[start : start + batch]
        logits, labels, owner = answer_logits(model, part)
        wrong = torch.zeros(len(part), dtype=torch.long).index_add(0, owner, (logits.argmax(-1) != labels).long())
        is_right += (wrong == 0).tolist()
    return is_right


def accuracy(model: LlamaForCausalLM, items: Sequence[Item]) -> float:
    return sum(exact_match(model, items)) / len(items)


def new_base(seed: int) -> LlamaForCausalLM:
    """An untrained model of eight layers and 0.9M parameters."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=104,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=8,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            initializer_range=0.08,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


def optimiser_step(optimiser: torch.optim.Optimizer, loss: torch.Tensor, *, learning_rate: float) -> None:
    """One update with gradients clipped to norm 1."""
    (group,) = optimiser.param_groups
    group["lr"] = learning_rate
    optimiser.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
    optimiser.step()


def answer_loss(model: LlamaForCausalLM, items: Sequence[Item]) -> torch.Tensor:
    logits, labels, _ = answer_logits(model, items)
    return cross_entropy(logits, labels)


def train_base(
    practices: Mapping[str, Practice], validation: Mapping[str, Sequence[Item]], *, seed: int
) -> LlamaForCausalLM:
    """Train until every skill is about half learned. Raises RuntimeError if that takes more than BASE_MAX_STEPS."""
    model = new_base(seed)
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.01, betas=(0.9, 0.98))
    skilled = dict.fromkeys(practices, 0.0)
    for step in range(1, BASE_MAX_STEPS + 1):
        loss = torch.zeros(())
        for skill, practice in practices.items():
            if skilled[skill] < BASE_TARGET:
                loss = loss + answer_loss(model, practice.take(BATCH[skill]))
            else:
                loss = loss + 0.2 * answer_loss(model, practice.take(BATCH[skill] // 4))
        optimiser_step(optimiser, loss, learning_rate=BASE_LEARNING_RATE * min(1.0, step / 100))
        if step % 25 == 0:
            skilled = {skill: accuracy(model, items) for skill, items in validation.items()}
            logger.info("base, step %d: %s", step, skilled)
            if min(skilled.values()) > BASE_FLOOR and sum(skilled.values()) / len(skilled) > BASE_MEAN:
                return model
    raise RuntimeError(f"base: not half skilled after {BASE_MAX_STEPS} steps: {skilled}")


def train_expert(base: LlamaForCausalLM, expert: Expert, practice: Practice) -> LlamaForCausalLM:
    """A copy of `base` fine-tuned on one skill, with a linearly decaying learning rate."""
    model = copy.deepcopy(base)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(name.startswith(f"model.layers.{layer}.") for layer in expert.layers))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, weight_decay=0.0, betas=(0.9, 0.98))
    for step in range(expert.steps):
        loss = answer_loss(model, practice.take(expert.batch))
        optimiser_step(
            optimiser, loss, learning_rate=expert.learning_rate * min(1.0, step / 20) * (1 - step / expert.steps)
        )
    return model


def save(model: LlamaForCausalLM, directory: pathlib.Path) -> None:
    """Write a checkpoint in bfloat16, with its tokenizer, in the format of transformers."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)


def write_items(items: Sequence[Item], file: pathlib.Path) -> None:
    file.write_text("".join(json.dumps({"prompt": item.prompt, "answer": item.answer}) + "\n" for item in items))


def train_family(out: pathlib.Path, plan: FamilyPlan = SHIPPED_FAMILY) -> None:
    """Write tasks, base and experts into `out`, and replace existing files."""
    splits = {skill: make_items(skill, plan=plan) for skill in plan.skills}
    held_out = {skill: {item.prompt for items in splits[skill].values() for item in items} for skill in plan.skills}
    (out / "tasks").mkdir(parents=True, exist_ok=True)
    for skill, items in splits.items():
        for split in ("search", "holdout"):
            write_items(items[split], out / "tasks" / f"{skill}_{split}.jsonl")

    base_splits = {skill: make_items(skill, skills=BASE_SKILLS, plan=plan) for skill in plan.skills}
    for skill, items_by_split in base_splits.items():
        held_out[skill] |= {item.prompt for items in items_by_split.values() for item in items}

    def practice(skill: str, of: Mapping[str, MakeItem], name: str) -> Practice:
        return Practice(of[skill], held_out=held_out[skill], seed=plan.seed_of(skill, name))

    base = train_base(
        {skill: practice(skill, BASE_SKILLS, "base") for skill in plan.skills},
        {skill: items["validation"] for skill, items in base_splits.items()},
        seed=plan.seed,
    )
    save(base, out / "base")
    for skill in plan.skills:
        model = train_expert(base, EXPERTS[skill], practice(skill, SKILLS, "expert"))
        logger.info("%s: %s", skill, {other: accuracy(model, splits[other]["validation"]) for other in plan.skills})
        save(model, out / "experts" / skill)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write the family into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skills", default=",".join(SHIPPED), help=f"some of {', '.join(SKILLS)}, comma-separated")
    parser.add_argument("--holdout", type=int, default=HOLDOUT_ITEMS, help="held-out items of each skill")
    parser.add_argument("--threads", type=int, default=1, help="one is fastest if other programs use the cores")
    arguments = parser.parse_args()
    skills = tuple(arguments.skills.split(","))
    if unknown := set(skills) - SKILLS.keys():
        parser.error(f"unknown skills {', '.join(sorted(unknown))}; known are {', '.join(SKILLS)}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(arguments.threads)
    train_family(arguments.out, FamilyPlan(skills, arguments.seed, arguments.holdout))


if __name__ == "__main__":
    main()
