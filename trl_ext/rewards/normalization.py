"""Normalise a mathematical answer: remove LaTeX layout, units and labels, and spell numbers in one way."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

SYMBOLS = {
    **dict.fromkeys("−–‐‑‒—―", "-"), "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "∞": r"\infty ",
    **dict.fromkeys("°º˚", r"^\circ "), "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∈": r"\in ",
    "∅": r"\emptyset ", "±": r"\pm ", "ℝ": r"\mathbb{R}", "⁄": "/", "∕": "/", "。": ".", "′": "'", "’": "'",
    "\u00a0": " ", "\u202f": "",
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
}  # fmt: skip
GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho"
SYMBOLS |= {chr(ord("α") + index): rf"\{name} " for index, name in enumerate(GREEK.split())}
SYMBOLS |= {"σ": r"\sigma ", "τ": r"\tau ", "φ": r"\phi ", "χ": r"\chi ", "ψ": r"\psi ", "ω": r"\omega "}
RAISED, LOWERED = re.compile("[⁰¹²³⁴-⁹⁺⁻]+"), re.compile("[₀-₉]+")
VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
ROOT = re.compile(r"√\s*([0-9]+(?:\.[0-9]+)?|[A-Za-z]|\([^()]*\))")
FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x2212: "-"}
# A comma in braces or before a negative space, or a thin space: the separators of LaTeX.
SEPARATOR = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[!,;:])\s*(?=[0-9]{3}(?![0-9]))")
Rules = list[tuple[re.Pattern[str], str]]
LAYOUT_RULES: Rules = [
    (SEPARATOR, ","),
    (re.compile(r"\\(?:left|right|[bB]ig{1,2}[lrm]?|displaystyle|limits)(?![A-Za-z])\.?"), ""),
    (re.compile(r"(?<!\\)\\[!,;:]|\\q?quad|(?<!\\)~"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\{\}\^"), "^"),
    (re.compile(r"(?<!\\)\\ "), " "),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\^\s*\{\s*\\degree\s*\}|\^?\s*\\degree(?![A-Za-z])"), r"^\\circ"),
    (re.compile(r"\\(sin|cos|tan|sec|csc|cot|sinh|cosh|tanh)\s*\^\s*\{\s*-\s*1\s*\}"), r"\\arc\1 "),
]
# The brackets around a matrix and the columns of an array are spelled in several ways; a last row may be empty.
MATRIX = r"\s*\\begin\{pmatrix\}((?:(?!\\begin|\\end).)*)\\end\{pmatrix\}\s*"
MATRIX_RULES: Rules = [
    (re.compile(r"\\begin\s*\{array\}\s*\{[lcr|\s]*\}"), r"\\begin{pmatrix}"),
    (re.compile(r"\\(begin|end)\s*\{(?:array|(?:[pbB]|small)?matrix)\}"), r"\\\1{pmatrix}"),
    (re.compile(r"\s*\\\\\s*(?=\\end\{)"), ""),
    (re.compile(rf"\|{MATRIX}[)\]|]", re.DOTALL), r"\\begin{vmatrix}\1\\end{vmatrix}"),
    (re.compile(rf"[(\[]{MATRIX}[)\]|]", re.DOTALL), r"\\begin{pmatrix}\1\\end{pmatrix}"),
]
# Of lower-case text.
FRACTION_RULES: Rules = [
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\d)\s*(?=\{)"), r"\\frac{\1}"),
    (re.compile(r"\\frac\s*(\{[^{}]*\})\s*(\d)"), r"\\frac\1{\2}"),
]
# Of lower-case text. Spaces between digits, around a word, and between a command and a letter are kept.
ELEMENT_RULES: Rules = [
    (re.compile(r"\\sqrt\s*([0-9a-z])"), r"\\sqrt{\1}"),
    (re.compile(r"\\([lgn]e)(?:qslant|qq|q)(?![a-z])"), r"\\\1"),
    (re.compile("<="), r"\\le "),
    (re.compile(">="), r"\\ge "),
    (re.compile(r"\\lt "), "<"),
    (re.compile(r"\\gt "), ">"),
    (re.compile(r"(?<!log)_\s*([0-9]+|[a-z](?![a-z]))"), r"_{\1}"),
    (re.compile(r"(?<![a-z])(d[a-z])/(d[a-z])(?![a-z])"), r"\\frac{\1}{\2}"),
    (re.compile(r"^\+(?=\\infty)"), ""),
    (re.compile(r"(\\[a-z]+|(?<![\\a-z])[a-z]{3,})\s+(?=[a-z])|([a-z])\s+(?=[a-z]{3,})"), "\\1\\2\0"),
    (re.compile(r"(?<![0-9\0])\s+|\s+(?![0-9])"), ""),
    (re.compile("\0"), " "),
]
UNIT_SYNONYMS = {
    "cm": "centimeter centimeters centimetre centimetres", "mm": "millimeter millimeters",
    "m": "meter meters metre metres",
    "km": "kilometer kilometers kilometre kilometres", "inch": "inches in", "foot": "feet ft", "yard": "yards yd",
    "mile": "miles mi", "second": "seconds sec secs s", "minute": "minutes min mins", "hour": "hours hr hrs h",
    "day": "days", "week": "weeks", "month": "months", "year": "years yr yrs", "degree": "degrees deg",
    "dollar": "dollars usd", "cent": "cents", "percent": "percentage pct", "gram": "grams g",
    "kg": "kilogram kilograms",
    "pound": "pounds lb lbs", "ounce": "ounces oz", "liter": "liters litre litres l", "gallon": "gallons",
    "mph": "", "unit": "units",
}  # fmt: skip
UNITS = {word: unit for unit, synonyms in UNIT_SYNONYMS.items() for word in (unit, *synonyms.split())}
# A single letter next to a number is a variable, unless it is in \text{}.
PLAIN_UNITS = "|".join(sorted((word for word in UNITS if len(word) > 1), key=len, reverse=True))
UNIT = rf"(?:(?:square|cubic|sq)\.?\s+)?(?:{PLAIN_UNITS})\.?(?:\s*\^\s*\{{?[23]\}}?)?"
# Units of one letter are recognised only in a speed or an acceleration.
RATE = r"(?:(?:[kcm]?m|ft|mi)\s*/\s*(?:sec|s|min|hr)|(?:km|mi)\s*/\s*h)(?:\s*\^\s*\{?2\}?)?"
TRAILING_UNIT = re.compile(rf"(?<=[\d}})\s])({RATE}|{UNIT}(?:\s*(?:/|per)\s*{UNIT})?)$", re.IGNORECASE)
# Words that change the preceding number or make a statement about it.
NO_UNIT = re.compile(
    r"\b(?:or|and|not|no|plus|minus|times|over|base|mod|modulo|choose|factorial|zero|one|two|three|four|five|six|seven|eight"
    r"|nine|ten|eleven|twelve|hal(?:f|ves)|(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|dozen"
    r"|(?:hundred|thousand|million|billion|trillion)(?:th)?)s?)\b|^(?:squared|cubed)\b"
)
WORDS = "text(?:bf|it|rm|normal|sf|tt|sc)?|[mh]box|mathrm|mathsf|rm"
TEXT_COMMAND = re.compile(rf"\\(?:{WORDS}|mathbf)\s*\{{([^{{}}]*)\}}")
TRAILING_TEXT = re.compile(rf"\\(?:{WORDS})\s*\{{([^{{}}]*)\}}(\s*\^\s*\{{?[23]\}}?)?$")
BOLD = re.compile(r"\*\*\s*((?:(?!\*\*).)+?)\s*\*\*[.:]?")
# The `x` of `x = 5`, the `f(2)` of `f(2) = 5`, the `y'` of `y' = 2x`.
LABEL = re.compile(
    r"^([A-Za-z](?:_\s*(?:\w|\{\s*\w+\s*\}))?\s*'*\s*(?:\([^()=]{1,20}\))?)\s*(?:=|\\in(?![A-Za-z]))\s*(?=\S)"
)
REVERSED_LABEL = re.compile(r"([^=]*[^=\s<>!\\])\s*=\s*([A-Za-z])")
THOUSANDS = re.compile(r"^([+-]?)([0-9]{1,3}(?:,[0-9]{3})+)(\.[0-9]*)?$")
SCIENTIFIC = re.compile(
    r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:e|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*)(\{?)\s*([+-]?[0-9]{1,3})\s*(\}?)",
    re.IGNORECASE,
)
DEGREE = re.compile(r"\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*(?:([CF])|\\(?:text|mathrm)\s*\{\s*([CF])\s*\})?$")
SCALED = re.compile(r"^([+-]?[0-9]+(?:\.[0-9]+)?)\s*(hundred|thousand|million|billion|trillion)$", re.IGNORECASE)
INTEGER = re.compile(r"[+-]?[0-9]+")
DECIMAL = re.compile(r"[+-]?(?=\.?[0-9])[0-9]*\.?[0-9]*")
FRACTION = re.compile(r"([+-]?)(?:\\frac\{([+-]?[0-9]+)\}\{([+-]?[0-9]+)\}|([0-9]+)/([0-9]+))")
MIXED = re.compile(r"(-?)([0-9]+)\s*(?:\\frac\{([0-9]+)\}\{([0-9]+)\}|(?<=\s)([0-9]+)/([0-9]+))")
# Repeating decimals: the digits under a bar.
REPEATING = re.compile(r"([+-]?)([0-9]*)\.([0-9]*)\\(?:bar|overline)\s*(?:\{([0-9]+)\}|([0-9]))")
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}


@dataclass(frozen=True)
class Answer:
    """A normalised answer: its body, still in LaTeX; its unit in one spelling; the `f(2)` of `f(2) = 5`."""

    body: str
    unit: str = ""
    variable: str = ""

    def contradicts(self, other: Answer) -> bool:
        """Whether both name a unit, or both a variable, and the names differ."""
        pairs = (self.unit, other.unit), (self.variable.lower(), other.variable.lower())
        return any(one and two and one != two for one, two in pairs)


def clean(text: str) -> Answer:
    """Remove layout, delimiters, units and a leading `x =` from an answer of ordinary length."""
    text = _rewritten(text if text.isascii() else _ascii(text), LAYOUT_RULES)
    text = _rewritten(_without_delimiters(" ".join(text.split())), MATRIX_RULES)
    variable = ""
    label = LABEL.match(text)
    if label and "=" not in text[label.end() :]:
        variable, text = "".join(label[1].split()), text[label.end() :]
    elif reversed_label := REVERSED_LABEL.fullmatch(text):
        text, variable = reversed_label.groups()
    text, unit = _without_unit(text)
    text = TEXT_COMMAND.sub(r" \1 ", text).strip()
    # Turn conjunctions into commas, remove commas inside numbers, and write out `3 million`.
    parts = re.split(r"\s*,?\s+(?:or|and)\s+", text)
    return Answer(",".join(_plain_number(part.strip()) for part in parts), unit, variable)


def plain_digits(text: str) -> str:
    """Full-width characters, the minus sign and the digits of any script as ASCII."""
    return text if text.isascii() else re.sub(r"\d", lambda digit: str(int(digit[0])), text.translate(FULL_WIDTH))


def _ascii(text: str) -> str:
    """Unicode's mathematical characters in LaTeX."""
    text = RAISED.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", plain_digits(text))
    text = LOWERED.sub(lambda match: f"_{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = VULGAR_FRACTION.sub(_fraction, text)
    for symbol, latex in SYMBOLS.items():
        text = text.replace(symbol, latex)
    return unicodedata.normalize("NFKC", ROOT.sub(r"\\sqrt{\1}", text)).replace("\u2212", "-")


def _fraction(match: re.Match) -> str:
    return r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", match[0]).split("\u2044"))


def _rewritten(text: str, rules: Rules) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def _without_delimiters(text: str) -> str:
    """Remove dollars, bold stars, a text command around everything and full stops, in whatever order they come."""
    before = None
    while text != before:
        before = text
        bold = BOLD.fullmatch(text)
        text = bold[1] if bold else text
        for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
                text = text[len(opening) : -len(closing)].strip()
        while text.endswith((".", ";", ",")):
            text = text[:-1].rstrip()
        whole = TEXT_COMMAND.fullmatch(text)
        text = whole[1].strip() if whole else text
    return text


def _without_unit(text: str) -> tuple[str, str]:
    """The text without its unit, and the unit."""
    currency = re.match(r"^(-?)\s*(\\?\$|£|€)\s*(?=[-\d.\\])", text)
    if currency:
        text = currency[1] + text[currency.end() :]
    unit = "dollar" if currency and "$" in currency[2] else currency[2] if currency else ""
    text = text.replace(r"\$", "").replace("$", "")
    percent = re.search(r"\s*\\?%$", text)
    degree = DEGREE.search(text)
    if percent or degree:
        scale = degree and (degree[1] or degree[2])
        return text[: (percent or degree).start()], "percent" if percent else f"degree{scale or ''}"
    words = TRAILING_TEXT.search(text)
    if words and words.start() and _names_a_unit(words[1]) and re.search(r"\d|\\pi|\\sqrt", text[: words.start()]):
        return text[: words.start()].strip(), _one_spelling(words[1] + (words[2] or "")) or unit
    plain = TRAILING_UNIT.search(text)
    if plain and re.search(r"\d", text[: plain.start()]):
        return text[: plain.start()].strip(), _one_spelling(plain[1])
    return text, unit


def _names_a_unit(words: str) -> bool:
    """Whether words after a number are a unit, not a conjunction, an option letter or the imaginary unit."""
    words = words.strip().lower()
    if not re.fullmatch(r"[a-z .,/]*", words) or NO_UNIT.search(words):
        return False
    return len(words) != 1 or words in UNITS


def _one_spelling(unit: str) -> str:
    """The canonical spelling of a unit, such as `square feet` and `ft^2`; empty for words not in the list."""
    power = "2" if re.search(r"\b(?:square|sq)\b|\^\s*\{?2", unit, re.IGNORECASE) else ""
    power = "3" if re.search(r"\bcubic\b|\^\s*\{?3", unit, re.IGNORECASE) else power
    words = [word for word in re.findall(r"[a-z]+", unit.lower()) if word not in ("square", "sq", "cubic", "per")]
    if not words or any(word not in UNITS for word in words):
        return ""
    return "/".join(UNITS[word] for word in words) + power


def _without_exponent(text: str) -> str:
    """`1.5e3` and `1.5\\times 10^{3}` as `1500`; any other text as it is."""
    scientific = SCIENTIFIC.fullmatch(text)
    if not scientific or bool(scientific[2]) != bool(scientific[4]):
        return text
    return f"{Decimal(f'{scientific[1]}e{scientific[3]}'):f}"


def _plain_number(text: str) -> str:
    """A number without exponent and thousands separators; `3 million` written out."""
    text = _without_exponent(text)
    if THOUSANDS.fullmatch(text):
        return text.replace(",", "")
    scaled = SCALED.fullmatch(text.replace(",", ""))
    value = Fraction(scaled[1]) * 10 ** SCALES[scaled[2].lower()] if scaled else None
    return str(value) if value is not None and value.denominator == 1 else text


def canonical(text: str) -> str:
    """A part of an answer in lower case, without spaces, and with one spelling of each fraction and whole number."""
    text = text.strip().lower()
    if INTEGER.fullmatch(text):
        return str(int(text))
    if matrix := re.fullmatch(r"\\begin\{([a-z]*matrix)\}(.*)\\end\{\1\}", text, re.DOTALL):
        rows = (row.split("&") for row in matrix[2].split(r"\\"))
        return f"{matrix[1]}:" + r"\\".join("&".join(map(canonical, row)) for row in rows)
    # In `2 3/4`, the space matters.
    if mixed := MIXED.fullmatch(_rewritten(text, FRACTION_RULES)):
        sign, whole, *parts = (part for part in mixed.groups() if part is not None)
        return f"{sign}({whole}+{parts[0]}/{parts[1]})"
    text = _rewritten(text, FRACTION_RULES + ELEMENT_RULES)
    while text.startswith("{") and text.endswith("}") and "{" not in text[1:-1]:
        text = text[1:-1]
    text = _without_exponent(text)
    if repeating := REPEATING.fullmatch(text):
        # 0.1666... is (16 - 1)/90.
        sign, whole, before, *repeated = repeating.groups(default="")
        start, digits = int(f"{whole}{before}" or "0"), "".join(repeated)
        text = f"{sign}{Fraction(int(f'{start}{digits}') - start, (10 ** len(digits) - 1) * 10 ** len(before))}"
    if DECIMAL.fullmatch(text) and not text.partition(".")[2].strip("0"):
        return str(Fraction(text))
    if fraction := FRACTION.fullmatch(text):
        sign, *parts = (part for part in fraction.groups() if part is not None)
        negative = (sign + "".join(parts)).count("-") % 2
        return "-" * negative + "/".join(str(abs(int(part))) for part in parts)
    return text


def rational(text: str) -> Fraction | None:
    """The value of a whole number, a decimal, a fraction or a mixed number in canonical spelling; None for others."""
    if mixed := re.fullmatch(r"(-?)\(([0-9]+)\+([0-9]+/[0-9]*[1-9][0-9]*)\)", text):
        value = int(mixed[2]) + Fraction(mixed[3])
        return -value if mixed[1] else value
    is_number = DECIMAL.fullmatch(text) or FRACTION.fullmatch(text)
    return Fraction(text) if is_number and not text.endswith("/0") else None
