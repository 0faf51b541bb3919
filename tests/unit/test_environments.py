"""The four environments, each on its own ground, and how actions are read."""

import http.server
import json
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from psrl.agents.actions import action_format, match_action
from psrl.agents.env import EnvironmentFault, Observation, make_environment
from psrl.agents.facts import make_world
from psrl.errors import ConfigError, InputError, UnsupportedError
from tests.helpers.games import WINNING, textworld_task


def test_environments_are_made_by_name():
    with pytest.raises(ConfigError, match="one of textworld, alfworld, search, webshop, got 'chess'"):
        make_environment("chess")
    with pytest.raises(ConfigError, match=r"environment webshop has no option adress \(it has: url, timeout"):
        make_environment("webshop", {"adress": "x"})


# TextWorld


@pytest.fixture
def textworld_environment():
    pytest.importorskip("textworld", reason="needs the extra textworld")
    environment = make_environment("textworld", {"progress_reward": 0.1})
    yield environment
    environment.close()


def test_textworld_rewards_the_quest(textworld_environment):
    shown = textworld_environment.reset(textworld_task())
    assert "unlock" in shown.text and "take latchkey" in shown.admissible and "look" in shown.admissible
    assert textworld_environment.oracle_commands == WINNING
    shown = textworld_environment.step(WINNING[0])
    assert (shown.reward, shown.done, shown.success) == (0.1, False, False)
    shown = textworld_environment.step(WINNING[1])
    assert (shown.reward, shown.done, shown.success) == (1.1, True, True)
    assert textworld_environment.reset(textworld_task()).done is False


def test_textworld_hides_commands_but_never_those_that_win(textworld_environment):
    hidden = ["examine", "look", "inventory", "take", "go"]
    shown = textworld_environment.reset(textworld_task(hidden_commands=hidden))
    assert shown.admissible == ("take latchkey",)


def test_textworld_says_what_a_task_lacks(textworld_environment):
    with pytest.raises(InputError, match="the task has no num_rooms"):
        textworld_environment.reset({"seed": 3})
    with pytest.raises(InputError, match="seed of the task must be of type int, got 'x'"):
        textworld_environment.reset(textworld_task(seed="x"))
    with pytest.raises(InputError, match="step before reset"):
        make_environment("textworld").step("look")


# ALFWorld


def test_alfworld_plays_a_game_with_readable_names(shared_dir: Path, tmp_path: Path):
    pytest.importorskip("textworld", reason="needs the extra alfworld")
    pytest.importorskip("fast_downward", reason="needs the extra alfworld")
    archive = shared_dir / "traces" / "alfworld_games_16.tar.gz"
    if not archive.is_file():
        pytest.skip(f"no {archive}")
    with tarfile.open(archive) as files:
        member = next(m for m in files if "look_at_obj" in m.name and m.name.endswith("game.tw-pddl"))
        member.name = "game.tw-pddl"
        files.extract(member, tmp_path, filter="data")
    environment = make_environment("alfworld", {"oracle": True})
    shown = environment.reset({"game_file": str(tmp_path / "game.tw-pddl")})
    assert shown.text.startswith("You are in the middle of a room.") and "Your task is to: look at" in shown.text
    assert "_bar_" not in shown.text and "go to drawer 1" in shown.admissible and "help" not in shown.admissible
    for command in environment.oracle_commands:
        assert command in shown.admissible and not shown.done
        shown = environment.step(command)
    assert (shown.reward, shown.done, shown.success) == (1.0, True, True)
    environment.close()


def test_alfworld_says_which_game_is_missing():
    pytest.importorskip("fast_downward", reason="needs the extra alfworld")
    with pytest.raises(InputError, match=r"no file /nowhere/game.tw-pddl"):
        make_environment("alfworld").reset({"game_file": "/nowhere/game.tw-pddl"})


# Search


@pytest.fixture
def search_task(tmp_path: Path):
    pytest.importorskip("bm25s", reason="needs the extra search")
    world = make_world(seed=1, num_people=12)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(document) + "\n" for document in world.documents))
    question = next(question for question in world.questions if question.num_hops == 3)
    return {"question": question.question, "answers": [question.answer], "corpus": str(corpus)}


def test_search_answers_a_question_in_three_hops(search_task):
    environment = make_environment("search", {"num_results": 1})
    shown = environment.reset(search_task)
    assert shown.text == f"Question: {search_task['question']}"
    person = search_task["question"].rsplit("employs ", 1)[1].rstrip("?")
    found = environment.step(f"search[{person}]").text
    assert found.startswith(f"[1] {person}: {person} was born in ")
    company = found.rsplit("employed by ", 1)[1].rstrip(".")
    city = environment.step(f"search[{company} seat]").text.rsplit("in ", 1)[1].rstrip(".")
    country = environment.step(f"search[{city} city country]").text.rsplit("in ", 1)[1].rstrip(".")
    copy = environment.copy()
    shown = environment.step(f"answer[The {country.upper()}.]")
    assert (shown.reward, shown.done, shown.success) == (1.0, True, True)
    wrong = copy.step("answer[nowhere]")
    assert (wrong.reward, wrong.done, wrong.success) == (0.0, True, False)


def test_search_has_an_answer_to_everything(search_task):
    environment = make_environment("search")
    environment.reset(search_task)
    assert environment.step("search[zzz the of]").text == "Nothing found."
    assert environment.step("open[door]").text == "Not an action: open[door]"
    with pytest.raises(InputError, match="corpus of the task: no file"):
        environment.reset({**search_task, "corpus": "/nowhere.jsonl"})


def test_a_world_is_the_same_for_the_same_seed():
    assert make_world(5, 20) == make_world(5, 20) != make_world(6, 20)
    world = make_world(5, 20)
    assert len(world.documents) == 20 + 10 + 5 and len({d["title"] for d in world.documents}) == 35
    assert [sum(q.num_hops == hops for q in world.questions) for hops in (1, 2, 3)] == [40, 40, 20]


# WebShop, against a small server with the routes and the markup of web_agent_site

PAGES = {
    "init": "<div id='instruction-text'><h4>Instruction:<br>buy a red mug</h4></div><button>Search</button>",
    "search_results": (
        "<button>Back to Search</button><h3>Page 1 (Total results: 2)</h3><button>Next &gt;</button>"
        "<a class='product-link'>B01MUG</a><h4>A mug</h4><h5>$9.50</h5>"
        "<a class='product-link'>B02CUP</a><h4>A cup</h4><h5>$3</h5>"
    ),
    "item_page": (
        "<button>Back to Search</button><button>&lt; Prev</button><h4>color</h4>"
        "<input type='radio'><label>red</label><input type='radio'><label>blue</label>"
        "<h2>A mug</h2><button>Description</button><button>Buy Now</button>"
    ),
    "item_sub_page": "<button>Back to Search</button><button>&lt; Prev</button><p>Holds coffee.</p>",
    "done": "<h1>Thank you!</h1><h3>Your score (min 0.0, max 1.0)</h3><pre>{score}</pre>",
}


class StandIn(http.server.BaseHTTPRequestHandler):
    paths: list[str]

    def do_GET(self) -> None:
        parts = self.path.strip("/").split("/")
        self.paths.append(unquote(self.path))
        body = PAGES.get(parts[0], PAGES["init"])
        # Only the session of goal 7 may buy, and only the red one is right.
        score = 1.0 if parts[0] == "done" and parts[1].endswith("fixed_7") and "red" in parts[-1] else 0.25
        html = f"<html><head><title>WebShop</title></head><body>{body.replace('{score}', str(score))}</body></html>"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(html.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def webshop() -> Iterator[tuple[str, list[str]]]:
    handler = type("Handler", (StandIn,), {"paths": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.paths
    server.shutdown()
    server.server_close()
    thread.join()


def test_webshop_buys_the_right_thing(webshop):
    url, paths = webshop
    environment = make_environment("webshop", {"url": url})
    shown = environment.reset({"goal": 7})
    assert shown.text == "Instruction:\nbuy a red mug\n[Search]" and shown.admissible == ("search[...]",)
    shown = environment.step("search[red [mug]/cup]")
    assert shown.text.splitlines()[-3:] == ["[B02CUP]", "A cup", "$3"]
    assert shown.admissible == ("click[Back to Search]", "click[Next >]", "click[B01MUG]", "click[B02CUP]")
    assert environment.step("click[B99]").text == "There is no [B99] on this page."
    shown = environment.step("click[B01MUG]")
    assert "color [red] [blue]" in shown.text
    assert "Holds coffee." in environment.step("click[Description]").text
    assert "color [red] [blue]" in environment.step("click[< Prev]").text
    assert "color [[red]] [blue]" in environment.step("click[red]").text
    shown = environment.step("click[Buy Now]")
    assert (shown.reward, shown.done, shown.success) == (1.0, True, True)
    session = paths[0].strip("/")
    assert session.endswith("_fixed_7")
    assert paths == [
        f"/{session}",
        f"/search_results/{session}/red mug cup/1",
        f"/item_page/{session}/B01MUG/red mug cup/1/{{}}",
        f"/item_sub_page/{session}/B01MUG/red mug cup/1/Description/{{}}",
        f"/item_page/{session}/B01MUG/red mug cup/1/{{}}",
        f"/item_page/{session}/B01MUG/red mug cup/1/{{'color': 'red'}}",
        f"/done/{session}/B01MUG/{{'color': 'red'}}",
    ]


def test_webshop_turns_pages_and_gives_part_of_the_reward(webshop):
    url, paths = webshop
    environment = make_environment("webshop", {"url": url})
    environment.reset({"goal": 3})
    assert environment.step("click[Buy Now]").text == "There is no [Buy Now] on this page."
    environment.step("search[mug]")
    assert environment.step("search[cup]").text == "There is nothing to search with on this page."
    environment.step("click[Next >]")
    assert paths[-1].endswith("/mug/2")
    environment.step("click[B02CUP]")
    shown = environment.step("click[Buy Now]")
    assert (shown.reward, shown.done, shown.success) == (0.25, True, False)


def test_webshop_says_where_no_server_answers():
    with pytest.raises(EnvironmentFault, match=r"does not answer at http://127.0.0.1:9/"):
        make_environment("webshop", {"url": "http://127.0.0.1:9", "timeout": 2}).reset({"goal": 0})


# Actions


def test_lines_are_read_after_the_last_action():
    shown = Observation("A hall.", admissible=("go east", "look", "search[...]"))
    line = action_format("line")
    assert line.render(shown) == "A hall.\nCommands: [go east, look, search[...]]"
    assert line.render(Observation("Free.")) == "Free."
    reply = line.read("Action: look\nNo, the door.\nAction:  Go  EAST \n", shown)
    assert (reply.action, reply.thought) == ("go east", (0, 27))
    assert line.read("go east", shown).action is None
    assert line.read("Action: dance", shown).action is None
    assert line.read("Action: dance", Observation("")).action == "dance"


def test_templates_take_any_text():
    assert match_action("SEARCH[ red  Mug ]", ["search[...]"]) == "search[red Mug]"
    assert match_action("search[]", ["search[...]"]) is None
    assert match_action("search[mug", ["search[...]"]) is None


def test_menus_are_read_by_letter():
    shown = Observation("A hall.", admissible=("go east", "look", "wait"))
    menu = action_format("menu")
    assert menu.render(shown) == "A hall.\nA: go east\nB: look\nC: wait"
    assert menu.read("Action: B", shown) == ("look", (0, 8))
    assert menu.read("xxCyB", shown).action == "wait"
    assert menu.read("Z d b", shown).action is None
    with pytest.raises(UnsupportedError, match="menu needs an environment that lists its actions"):
        menu.render(Observation("", admissible=("search[...]",)))
    with pytest.raises(UnsupportedError, match="there are 27 actions"):
        menu.render(Observation("", admissible=tuple(map(str, range(27)))))
