"""Parameters of a function as one line of text, and which calls stop to work when they change."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Parameter", "breaks", "parse"]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function of jax."""

    name: str
    kind: str
    """"positional" (by its place alone), "either", "keyword" (by its name alone), "*" or "**"."""
    required: bool


def parse(text: str) -> tuple[Parameter, ...]:
    """The parameters of a text as the table has it, where `=` stands after what may be left out.

    Examples:
        >>> from capibara.jax_releases import parse
        >>> [(one.name, one.kind, one.required) for one in parse("x, /, axis=, *, where=")]
        [('x', 'positional', True), ('axis', 'either', False), ('where', 'keyword', False)]
    """
    found: list[Parameter] = []
    kind = "either"
    for word in text.split(", ") if text else ():
        if word == "/":
            found = [Parameter(one.name, "positional", one.required) for one in found]
        elif word.startswith("**"):
            found.append(Parameter(word[2:], "**", required=False))
        elif word.startswith("*"):
            kind = "keyword"
            if word != "*":
                found.append(Parameter(word[1:], "*", required=False))
        else:
            found.append(Parameter(word.removesuffix("="), kind, required=not word.endswith("=")))
    return tuple(found)


def breaks(old: str, new: str) -> tuple[str, ...]:
    """What of a call that was right by the old parameters is wrong by the new ones, in words; empty where nothing is.

    Examples:
        >>> from capibara.jax_releases import breaks
        >>> breaks("a, axis=, out=", "a, *, axis=")
        ('axis is taken by its name alone', 'out is gone')
        >>> breaks("a", "a, axis=")
        ()
    """
    before, after = parse(old), parse(new)
    by_name = {one.name: one for one in after if one.kind in ("either", "keyword")}
    by_place = [one for one in after if one.kind in ("positional", "either")]
    more_places = any(one.kind == "*" for one in after)
    more_names = any(one.kind == "**" for one in after)
    said: dict[str, str] = {}
    place = 0
    for one in before:
        if one.kind in ("*", "**"):
            if one.kind not in {other.kind for other in after}:
                said[one.name] = (
                    f"more {'arguments' if one.kind == '*' else 'keywords'} ({one.kind}{one.name}) are gone"
                )
            continue
        known = any(other.name == one.name for other in after)
        if one.kind != "positional" and one.name not in by_name and not more_names:
            said[one.name] = f"{one.name} is taken by its place alone" if known else f"{one.name} is gone"
        if one.kind == "keyword":
            continue
        if place < len(by_place):
            other = by_place[place]
            # What was taken by its place alone may be renamed, and what is renamed is said above.
            if other.name != one.name and one.kind == "either" and one.name in by_name:
                said.setdefault(one.name, f"{one.name} has another place")
        elif not more_places and one.name not in said:
            said[one.name] = f"{one.name} is taken by its name alone" if known or more_names else f"{one.name} is gone"
        place += 1
    had = {one.name: one for one in before}
    renamed = len([one for one in before if one.kind == "positional"])
    for position, one in enumerate(after):
        if not one.required or one.name in said:
            continue
        earlier = had.get(one.name)
        if earlier is None and position >= renamed and not any(other.kind == "*" for other in before):
            said[one.name] = f"{one.name} is new and has to be given"
        elif earlier is not None and not earlier.required:
            said[one.name] = f"{one.name} has to be given"
    return tuple(said.values())
