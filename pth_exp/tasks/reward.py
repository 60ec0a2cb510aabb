r"""Numbers in text, exactly: the last number of a response is its answer.

A number is digits, with commas between thousands, a decimal part, an exponent of at most two digits, or a fraction. Read are
``$1,000``, ``1{,}000``, ``.5``, ``3/4``, ``\frac{3}{4}``, ``2 1/2`` and ``2½`` (two and a half); currency, per cent, emphasis and
full stops around a number do not count. A minus sign belongs to a number if it touches it (a currency sign may stand between) and
nothing that could be a left operand precedes it:
``= -5`` is minus five, ``10-5`` and ``10 - 5`` end in five.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

_WHOLE = r"(?: \d{1,3}+ (?: ,\d{3} (?!\d) )++ | \d++ )"
_FRACTION = r"/ 0*+ [1-9]\d*+ (?! / | \.\d )"
_NUMBER = re.compile(
    rf"""
    (?P<sign> (?<! [\w)\]}}.-] ) (?: - \\?[$€£¥]? | \\?[$€£¥]- ) )?
    (?:
        (?P<whole> {_WHOLE} ) [ ] (?P<over> \d++ ) (?P<under> {_FRACTION} )
      | (?: (?: \d++ / (?= \d ) ){{2,}}+ )?  # a date or another chain: its last link counts
        (?P<value> {_WHOLE} (?: \.\d++ )? | (?<! [\d.] ) \.\d++ )
        (?: [eE] (?P<exponent> [+-]? \d{{1,2}}+ ) (?! \w ) | (?P<divisor> {_FRACTION} ) )?
    )
    """,
    re.VERBOSE,
)
_LATEX_FRACTION = re.compile(r"\\[dtc]?frac\s*\{\s*(-?)\s*([\d,.]+)\s*\}\s*\{\s*([\d,.]+)\s*\}")
_REWRITTEN = {
    "{,}": ",",  # LaTeX's ways to write a comma or a thin space between thousands
    ",\\!": ",",
    "\\,": ",",
    "\N{MINUS SIGN}": "-",
    "\N{FULLWIDTH HYPHEN-MINUS}": "-",
    "\N{SMALL HYPHEN-MINUS}": "-",
    "\N{EN DASH}": "-",
    "\N{NON-BREAKING HYPHEN}": "-",
    "\N{FRACTION SLASH}": "/",
    "\N{NO-BREAK SPACE}": " ",
    "½": " 1/2",
    "¼": " 1/4",
    "¾": " 3/4",
}
_REWRITE = re.compile("|".join(map(re.escape, _REWRITTEN)))


def last_number(text: str) -> Fraction | None:
    """The last number in ``text``, or ``None`` if it holds none."""
    found = list(_NUMBER.finditer(_plain(text)))
    return _value(found[-1]) if found else None


def exact_number(text: str) -> Fraction | None:
    """The number that ``text`` is, or ``None`` if it is anything more or less than one number."""
    found = _NUMBER.fullmatch(_plain(text))
    return None if found is None else _value(found)


def _plain(text: str) -> str:
    text = _REWRITE.sub(lambda found: _REWRITTEN[found.group()], text)
    return _LATEX_FRACTION.sub(r"\1\2/\3", text)


def _value(found: re.Match[str]) -> Fraction:
    if found["whole"]:
        part = _exact(found["over"]) / _exact(found["under"][1:])
        # "2 10/4" is no mixed number: its last number stands alone.
        value = part + _exact(found["whole"]) if part < 1 else part
    else:
        value = _exact(found["value"])
        if found["exponent"]:
            value *= Fraction(10) ** int(found["exponent"])
        if found["divisor"]:
            value /= _exact(found["divisor"][1:])
    return -value if found["sign"] else value


def _exact(digits: str) -> Fraction:
    """By way of Decimal, which has no limit on the number of digits and reads every script's."""
    return Fraction(Decimal(digits.replace(",", "")))
