"""The closed vocabulary of the embedded benchmark: words by category and by word class, and number words."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CATEGORIES: dict[str, tuple[str, ...]] = {
    "animals": _words("bear cat dog fox goat horse lion mouse rabbit sheep tiger wolf"),
    "birds": _words("crow dove duck eagle goose hawk owl raven robin swan"),
    "fruits": _words("apple banana cherry grape lemon mango orange peach pear plum"),
    "vegetables": _words("bean cabbage carrot celery leek onion pea pepper potato turnip"),
    "colors": _words("black blue brown green grey pink purple red white yellow"),
    "tools": _words("axe brush drill hammer ladder nail rope saw shovel wrench"),
    "clothes": _words("belt boot coat dress glove hat jacket scarf shirt sock"),
    "drinks": _words("beer cider cocoa coffee juice milk soda tea water wine"),
    "instruments": _words("banjo bell cello drum flute guitar harp horn piano violin"),
    "furniture": _words("bed bench cabinet chair desk lamp mirror shelf sofa table"),
    "vehicles": _words("boat bus canoe car ferry plane ship train truck wagon"),
    "jobs": _words("baker captain clerk doctor farmer judge nurse painter pilot poet sailor teacher"),
}

ADJECTIVES = _words(
    "brave bright calm clever cold dark deep gentle happy hungry kind lazy little loud old proud quick quiet "
    "shy small soft strange strong tall tired warm wild wise young"
)
PLACES = _words(
    "beach bridge castle church field forest garden harbor hill lake market meadow river road school street "
    "tower valley village"
)
INTRANSITIVE_VERBS = _words("danced hid jumped laughed ran rested sang slept smiled waited walked worked")
TRANSITIVE_VERBS = _words("carried cleaned dropped followed found kept lost moved painted watched")
PREPOSITIONS = _words("behind beside by in near under")
ADVERBS = _words("again alone early slowly today together")
DETERMINERS = ("the", "a", "an")
CONJUNCTIONS = ("and",)
NAMES = _words(
    "Anna Ben Clara David Emma Felix Grace Henry Ivy Jack Karen Leo Maria Nina Oscar Paul Ruth Sam Tom Vera"
)

SUBJECTS = CATEGORIES["animals"] + CATEGORIES["jobs"]
OBJECTS = CATEGORIES["tools"] + CATEGORIES["clothes"] + CATEGORIES["instruments"] + CATEGORIES["furniture"]
NOUNS = tuple(word for name, words in CATEGORIES.items() if name != "colors" for word in words) + PLACES

WORD_CLASSES: dict[str, str] = {
    **dict.fromkeys(NOUNS, "noun"),
    **dict.fromkeys(ADJECTIVES + CATEGORIES["colors"], "adjective"),
    **dict.fromkeys(INTRANSITIVE_VERBS, "intransitive"),
    **dict.fromkeys(TRANSITIVE_VERBS, "transitive"),
    **dict.fromkeys(PREPOSITIONS, "preposition"),
    **dict.fromkeys(ADVERBS, "adverb"),
    **dict.fromkeys(DETERMINERS, "determiner"),
    **dict.fromkeys(CONJUNCTIONS, "conjunction"),
}

# The word classes that may follow each class in a fluent sentence.
TRANSITIONS: dict[str, frozenset[str]] = {
    "start": frozenset({"determiner"}),
    "determiner": frozenset({"adjective", "noun"}),
    "adjective": frozenset({"adjective", "noun"}),
    "noun": frozenset({"intransitive", "transitive", "preposition", "adverb", "conjunction", "end"}),
    "intransitive": frozenset({"preposition", "adverb", "conjunction", "end"}),
    "transitive": frozenset({"determiner"}),
    "preposition": frozenset({"determiner"}),
    "adverb": frozenset({"preposition", "conjunction", "end"}),
    "conjunction": frozenset({"determiner", "intransitive", "transitive"}),
}

CONTENT_WORDS = NOUNS + CATEGORIES["colors"] + ADJECTIVES + INTRANSITIVE_VERBS + TRANSITIVE_VERBS
STARTING_WORDS: dict[str, tuple[str, ...]] = {
    letter: words
    for letter in "abcdefghijklmnopqrstuvwxyz"
    if len(words := tuple(word for word in CONTENT_WORDS if word.startswith(letter))) >= 8
}

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
NUMBERS: dict[str, int] = {word: number for number, word in enumerate(NUMBER_WORDS)}


def with_article(word: str) -> str:
    """Return the word with its indefinite article: "a fox", "an owl"."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"
