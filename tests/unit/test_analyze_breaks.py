"""What breaks sharing, by kind: literal cases in bytes and in made-up words."""

from psrl.analyze import breaks
from psrl.analyze.breaks import find_breaks
from psrl.analyze.streams import Stream
from psrl.analyze.text import load_decoder
from tests.helpers.streams import stream, tree_of


def text_stream(prompt: str, response: str, session="s", uid="u", index=0) -> Stream:
    ids = [*prompt.encode(), *response.encode()]
    return stream(ids, [0] * len(prompt.encode()) + [1] * len(response.encode()), uid=uid, session=session, index=index)


def kinds_of(*streams: Stream, decode=load_decoder(None)):  # noqa: B008  (a pure function)
    summary = find_breaks(tree_of(*streams), decode)
    return [(b.scope, b.kind, b.prefix) for b in summary.worst], summary


def test_what_was_sampled_breaks_nothing():
    prompt = "a long enough prompt "
    found, summary = kinds_of(text_stream(prompt, "left"), text_stream(prompt, "right", session="t"))
    assert (found, summary.sampled_forks, summary.by_kind) == ([], 1, {})


def test_a_timestamp_in_the_system_prompt():
    prompt = "Today is {}. Play the game and answer in one word."
    found, summary = kinds_of(
        text_stream(prompt.format("2025-06-01"), "yes"), text_stream(prompt.format("2025-06-17"), "yes", index=1)
    )
    assert found == [("trajectory", breaks.TIMESTAMP, len("Today is 2025-06-"))]
    (worst,) = summary.worst
    assert worst.before == "Today is 2025-06-" and worst.lost == len("01. Play the game and answer in one word.yes")
    assert sorted(worst.texts) == [f"{day}. Play the game and answer in one word.yes" for day in ("01", "17")]
    found, _ = kinds_of(
        text_stream(prompt.format("10:31:07"), "yes", "s", "u"), text_stream(prompt.format("11:32:08"), "no", "t", "v")
    )
    assert [(scope, kind) for scope, kind, _ in found] == [("batch", breaks.TIMESTAMP)]


def test_a_history_whose_beginning_is_cut_off():
    turns = [f"turn {c * 3} says something; " for c in "abcdef"]
    full = text_stream("System. " + "".join(turns[:4]), "ok")
    window = text_stream("System. " + "".join(turns[2:5]), "ok", index=1)
    found, _ = kinds_of(full, window)
    assert found == [("trajectory", breaks.TRUNCATED, len("System. turn "))]


def test_removed_thoughts():
    first = text_stream("System. Question one? ", "<think>hm, let me see</think>go north")
    second = text_stream("System. Question one? go north. You are in a hall. ", "go east", index=1)
    found, _ = kinds_of(first, second)
    assert found == [("trajectory", breaks.REMOVED, len("System. Question one? "))]


def test_a_history_tokenised_again():
    """The model said "no" + "rth"; the history has "north" as "nor" + "th"."""
    words = dict(enumerate(["sys ", "ask ", "no", "rth", "nor", "th", ". you ", "see ", "a ", "box ", "and ", "more "]))

    def decode(ids):
        return "".join(words[i] for i in ids)

    first = stream([0, 1, 2, 3, 6, 7, 8, 9, 10, 11], [0, 0, 1, 1, 0, 0, 0, 0, 0, 0], uid="u", session="s")
    second = stream([0, 1, 4, 5, 6, 7, 8, 9, 10, 11, 9], [0] * 10 + [1], uid="u", session="s", index=1)
    found, summary = kinds_of(first, second, decode=decode)
    assert found == [("trajectory", breaks.RETOKENISED, 2)]
    assert summary.worst[0].before == "sys ask "
    ends_with_it = stream([0, 1, 2, 3], [0, 0, 1, 1], uid="u", session="s")
    assert kinds_of(ends_with_it, second, decode=decode)[0] == [("trajectory", breaks.RETOKENISED, 2)]
    found, summary = kinds_of(first, second, decode=None)
    assert found == [("trajectory", breaks.EDITED, 2)]  # without text nobody can tell
    assert summary.worst[0].before == "0 1"


def test_different_tasks_are_no_break():
    first = text_stream("System. Find the apple in the kitchen.", "ok", "s", "u")
    second = text_stream("System. Clean a knife, then put it in a drawer.", "ok", "t", "v")
    assert kinds_of(first, second)[0] == []
    second = text_stream("System. Clean a knife, then put it in a drawer.", "ok", "t", "u")
    assert kinds_of(first, second)[0] == [("group", breaks.REWRITTEN, len("System. "))]
