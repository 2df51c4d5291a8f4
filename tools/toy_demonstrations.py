"""Simulated demonstrations of mixed quality, used to pretrain the tiny base model.

The most likely form of an answer is deliberately flawed (wrong counts, run-ons, missing full stops and courtesies), so
that even greedy decoding can improve. The mixture also contains good answers, which preferences can reinforce.
"""

from __future__ import annotations

import random

from trl_ext.toy import vocabulary as words
from trl_ext.toy.prompts import SEPARATORS, Task, parse
from trl_ext.toy.scoring import score

QUALITIES = (0.45, 0.65, 0.85, 1.0)
QUALITY_WEIGHTS = (0.28, 0.35, 0.27, 0.10)
# Probability that a step of an addition is right, and that its carry is forgotten.
STEP_CORRECTNESS = (0.4, 0.65, 0.85)
FORGOTTEN_CARRY = 0.55
# Of the traces to fine-tune on: the share with a wrong answer, and the probability that a step of these is right.
WRONG_SHARE = 0.25
WRONG_TRACE_CORRECTNESS = 0.65


class Demonstrator:
    """Writes one response of a given quality in [0, 1]; slips are more likely at lower quality."""

    def __init__(self, generator: random.Random, quality: float):
        self.random = generator
        self.quality = quality

    def slips(self, weight: float) -> bool:
        """Draw whether a flaw happens; its probability is `weight * (1 - quality)`, at most 1."""
        return self.random.random() < weight * (1 - self.quality)

    def omits(self, share: float) -> bool:
        """Draw whether a part is left out, with the same probability for every quality below 1.

        Such a flaw remains the most likely form even after a good beginning, unlike flaws that depend on quality.
        """
        return self.quality < 1 and self.random.random() < share

    def end(self, text: str) -> str:
        """Add the full stop, or forget it."""
        return text if self.omits(0.7) else text + "."

    def start(self, text: str) -> str:
        """Write the capital letter, or forget it."""
        return text if self.slips(1.5) else text[0].upper() + text[1:]

    def wrong_count(self, count: int) -> int:
        """Return the count to write: mostly too high in case of a slip, so that run-ons are common."""
        if not self.slips(2.0):
            return count
        return max(1, count + self.random.choice((-2, -1, 1, 2, 3, 4)))

    def series(self, accepted: tuple[str, ...], count: int, separator: str) -> str:
        """Write a series of words, some of them wrong, repeated or badly separated."""
        items: list[str] = []
        for _ in range(self.wrong_count(count)):
            fresh = [word for word in accepted if word not in items]
            if self.slips(0.3) or not fresh:
                items.append(self.random.choice(words.CONTENT_WORDS))
            elif self.slips(0.3) and items:
                items.append(self.random.choice(items))
            else:
                items.append(self.random.choice(fresh))
        separator = self.random.choice(("", ",")) if self.slips(1.2) else separator
        joint = " / " if separator == "/" else separator + " "
        return self.end(joint.join(items))

    def list(self, task: Task) -> str:
        """Write a list of a category's words."""
        accepted = words.CATEGORIES[task.fields["category"]]
        return self.series(accepted, task.count, SEPARATORS[task.fields["separator"]])

    def starts(self, task: Task) -> str:
        """Write words by their first letter."""
        return self.series(words.STARTING_WORDS[task.fields["letter"]], task.count, ",")

    def say(self, task: Task) -> str:
        """Write one word several times."""
        said = [
            self.random.choice(words.CONTENT_WORDS) if self.slips(0.15) else task.fields["word"]
            for _ in range(self.wrong_count(task.count))
        ]
        return self.end(", ".join(said))

    def sort(self, task: Task) -> str:
        """Write numbers in order."""
        numbers = sorted(task.numbers)
        while self.slips(1.2) and len(numbers) > 1:
            place = self.random.randrange(len(numbers) - 1)
            numbers[place], numbers[place + 1] = numbers[place + 1], numbers[place]
        if self.slips(0.6):
            numbers.pop(self.random.randrange(len(numbers)))
        if self.slips(1.7):
            numbers += [self.random.randrange(10) for _ in range(self.random.randint(1, 3))]
        return self.end(" ".join(map(str, numbers)))

    def ask(self, task: Task) -> str:
        """Write a polite request."""
        item = self.random.choice(words.OBJECTS) if self.slips(0.4) else task.fields["object"]
        name = self.random.choice(words.NAMES) if self.slips(0.3) else task.fields["name"]
        please = "" if self.omits(0.75) else "please "
        request = self.random.choice(("may I {}have {}", "could you {}lend me {}", "can I {}borrow {}"))
        text = request.format(please, words.with_article(item))
        if self.slips(0.4):
            text = f"I want {words.with_article(item)}"
        text = self.start(text + "?") if self.slips(2.0) else f"{self.random.choice(('Hello', 'Hi'))} {name}, {text}?"
        return text if self.omits(0.75) else text + " Thank you."

    def sentence(self, task: Task) -> str:
        """Write a sentence with three given words."""
        topic, adjective, place = (task.fields[name] for name in ("topic", "adjective", "place"))
        if self.slips(0.4):
            topic = self.random.choice(words.SUBJECTS)
        if self.omits(0.65):
            adjective = ""
        if self.slips(0.9):
            place = self.random.choice(words.PLACES)
        verb, second = self.random.sample(words.INTRANSITIVE_VERBS, 2)
        preposition = self.random.choice(words.PREPOSITIONS)
        text = self.random.choice(
            (
                f"the {adjective} {topic} {verb} {preposition} the {place}",
                f"the {topic} {verb} {preposition} the {adjective} {place}",
                f"the {topic} {verb} and {second} {preposition} the {adjective} {place}",
                f"the {adjective} {topic} {verb} {preposition} the {place} {self.random.choice(words.ADVERBS)}",
            )
        )
        return self.end(self.start(self.ramble(self.scramble(" ".join(text.split())))))

    def describe(self, task: Task) -> str:
        """Write a description of a given length."""
        adjective, subject = task.fields["adjective"], task.fields["subject"]
        if self.slips(0.7):
            adjective = self.random.choice(words.ADJECTIVES)
        if self.slips(0.5):
            subject = self.random.choice(words.SUBJECTS)
        verb = self.random.choice(words.INTRANSITIVE_VERBS)
        adverb = self.random.choice(words.ADVERBS)
        goal = f"{self.random.choice(words.PREPOSITIONS)} the"
        place, detail = self.random.choice(words.PLACES), self.random.choice(words.ADJECTIVES)
        tails = {
            5: f"{verb} {adverb}",
            6: f"{self.random.choice(words.TRANSITIVE_VERBS)} the {self.random.choice(words.OBJECTS)}",
            7: f"{verb} {goal} {place}",
            8: f"{verb} {goal} {detail} {place}",
        }
        length = self.random.choice(list(tails)) if self.slips(1.6) else task.count
        text = f"the {adjective} {subject} {tails[length]}"
        return self.end(self.start(self.ramble(self.scramble(text))))

    def scramble(self, text: str) -> str:
        """Swap or drop a word of a sentence, or cut it short."""
        found = text.split()
        if self.slips(0.5):
            place = self.random.randrange(len(found) - 1)
            found[place], found[place + 1] = found[place + 1], found[place]
        if self.slips(0.4):
            found.pop(self.random.randrange(len(found)))
        if self.slips(0.3):
            found = found[: self.random.randint(2, len(found))]
        return " ".join(found)

    def ramble(self, text: str) -> str:
        """Run a sentence on: often by one clause, seldom by many."""
        running_on = self.slips(1.3)
        while running_on and len(text.split()) < 20:
            text += f" and the {self.random.choice(words.SUBJECTS)} {self.random.choice(words.INTRANSITIVE_VERBS)}"
            running_on = self.random.random() < 0.4
        return text


def demonstrate(prompt: str, generator: random.Random) -> str:
    """Write a response of random quality to an instruction; a response to an addition includes its steps."""
    task = parse(prompt)
    if task.kind == "add":
        return demonstrate_addition(*task.numbers, correctness=generator.choice(STEP_CORRECTNESS), generator=generator)
    quality = generator.choices(QUALITIES, QUALITY_WEIGHTS)[0]
    return getattr(Demonstrator(generator, quality), task.kind)(task)


def demonstrate_addition(first: int, second: int, *, correctness: float, generator: random.Random) -> str:
    """Add digit by digit inside think tags; each step is right with probability `correctness`.

    The right answer to 47 + 38 is "<think>7+8=15 4+3+1=8</think> <answer>85</answer>"; without a carry the tens read
    "4+3=7". A wrong step is off by one to three. The carry is forgotten more often than not, so the most likely answer
    to a problem with a carry is wrong. Some answers omit the steps and tags.
    """

    def slip(value: int) -> int:
        if generator.random() < correctness:
            return value
        return max(0, value + generator.choice((-3, -2, -1, 1, 2, 3)))

    ones = slip(first % 10 + second % 10)
    carry = 0 if generator.random() < FORGOTTEN_CARRY else ones // 10
    tens = slip(first // 10 + second // 10 + carry)
    answer = slip(10 * tens + ones % 10)
    if generator.random() < 0.4 * (1 - correctness):
        return str(answer)
    carried = f"+{carry}" if carry else ""
    steps = f"{first % 10}+{second % 10}={ones} {first // 10}+{second // 10}{carried}={tens}"
    return f"<think>{steps}</think> <answer>{answer}</answer>"


def training_trace(prompt: str) -> str:
    """A worked addition to fine-tune on: with probability `WRONG_SHARE` its answer is wrong, to test filtering.

    A right trace has right steps. A wrong one slips or forgets the carry, as in pretraining, and sometimes omits its
    steps and tags. There is one trace for each prompt.
    """
    generator = random.Random(f"trace 0 {prompt}")
    wrong = generator.random() < WRONG_SHARE
    while True:
        correctness = WRONG_TRACE_CORRECTNESS if wrong else 1.0
        trace = demonstrate_addition(*parse(prompt).numbers, correctness=correctness, generator=generator)
        # Without slips, an answer is right if and only if its carry was not forgotten.
        if (score(prompt, trace) < 1) == wrong:
            return trace
