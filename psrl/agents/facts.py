"""A made-up world as documents, and questions about it that take one to three look-ups."""

from __future__ import annotations

import random
from typing import NamedTuple

_SYLLABLES = ("ba", "den", "fo", "gri", "hal", "ju", "ka", "lor", "mi", "nes", "or", "pa", "qui", "ros", "ta", "vel")
_MAX_PLACES = 400


class Question(NamedTuple):
    question: str
    answer: str
    num_hops: int
    """Documents that have to be read one after the other."""


class World(NamedTuple):
    documents: list[dict[str, str]]
    """``title`` and ``text`` of each."""
    questions: list[Question]
    """Every question that can be asked, by number of hops, then at random."""


def make_world(seed: int, num_people: int = 60) -> World:
    """A world of people, companies, cities and countries; the same for the same arguments.

    Args:
        num_people: 4 .. 1600. There are half as many companies, a quarter as many cities, a twelfth as many countries.
    """
    if not 4 <= num_people <= 4 * _MAX_PLACES:
        raise ValueError(f"num_people must be in 4 .. {4 * _MAX_PLACES}, got {num_people}")
    rng = random.Random(f"facts/{seed}")
    names = _Names(rng)
    countries = [names.new() for _ in range(max(2, num_people // 12))]
    country_of = {names.new(): rng.choice(countries) for _ in range(max(2, num_people // 4))}
    cities = list(country_of)
    city_of = {f"{names.new()} Works": rng.choice(cities) for _ in range(max(2, num_people // 2))}
    companies = list(city_of)
    people = [f"{names.new()} {names.new()}" for _ in range(num_people)]
    born_in = {person: rng.choice(cities) for person in people}
    employer = {person: rng.choice(companies) for person in people}

    documents = [
        *({"title": city, "text": f"{city} is a city in {country}."} for city, country in country_of.items()),
        *({"title": name, "text": f"{name} is a company with its seat in {city}."} for name, city in city_of.items()),
        *({"title": p, "text": f"{p} was born in {born_in[p]} and is employed by {employer[p]}."} for p in people),
    ]
    by_hops: list[list[Question]] = [[], [], []]
    for person in people:
        company = employer[person]
        by_hops[0] += [
            Question(f"In which city was {person} born?", born_in[person], 1),
            Question(f"Which company employs {person}?", company, 1),
        ]
        by_hops[1] += [
            Question(f"In which country was {person} born?", country_of[born_in[person]], 2),
            Question(f"In which city is the seat of the company that employs {person}?", city_of[company], 2),
        ]
        in_country = country_of[city_of[company]]
        by_hops[2].append(
            Question(f"In which country is the seat of the company that employs {person}?", in_country, 3)
        )
    for questions in by_hops:
        rng.shuffle(questions)
    return World(documents, [question for questions in by_hops for question in questions])


class _Names:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._used: set[str] = set()

    def new(self) -> str:
        """A name of three syllables that has not been given yet."""
        while True:
            name = "".join(self._rng.choices(_SYLLABLES, k=3)).capitalize()
            if name not in self._used:
                self._used.add(name)
                return name
