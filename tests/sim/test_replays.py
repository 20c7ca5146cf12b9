"""Scripts that failed once, as the shrinker wrote them."""

from engine.sim.events.cache import BumpWeights
from engine.sim.events.kinds import Timed
from engine.sim.events.requests import AbortRunning, Arrive, NotFinite, Prompt, Retract
from engine.sim.events.sessions import Close, Fork, TakeTurn
from engine.sim.play import play
from engine.sim.world import WorldConfig


def test_a_closing_session_that_is_closed_again_with_an_abort_may_be_opened_anew() -> None:
    """Seed 300750 of mixed: the model of sessions, not the engine, took it for closing still."""
    config = WorldConfig(
        page_size=1,
        num_pages=48,
        num_rows=2,
        context_len=48,
        resume_unit="token",
        chunk_tokens=2,
        policy="priority",
        eviction="lfu",
        conservativeness=0.3,
        preemption_threshold=1,
        caching=True,
        max_live=12,
        is_canary=False,
    )
    script = [
        Timed(
            step=0,
            in_flight=False,
            event=Arrive(
                key=17,
                prompt=Prompt(head=0, shared=0, tail=1, own=2, after=12),
                max_new=47,
                n=1,
                seed=None,
                stop_after=None,
                priority=0,
                salt=None,
                time_limit_s=None,
            ),
        ),
        Timed(
            step=6,
            in_flight=True,
            event=Arrive(
                key=19,
                prompt=Prompt(head=0, shared=0, tail=1, own=2, after=12),
                max_new=13,
                n=1,
                seed=None,
                stop_after=None,
                priority=0,
                salt=None,
                time_limit_s=None,
            ),
        ),
        Timed(
            step=7,
            in_flight=False,
            event=Arrive(
                key=22,
                prompt=Prompt(head=0, shared=0, tail=22, own=3, after=None),
                max_new=5,
                n=4,
                seed=None,
                stop_after=None,
                priority=0,
                salt=None,
                time_limit_s=None,
            ),
        ),
        Timed(
            step=8,
            in_flight=False,
            event=TakeTurn(key=25, session=0, tail=1, own=1, max_new=4, seed=None, keep=None, timeout_s=None),
        ),
        Timed(step=9, in_flight=True, event=Close(session=0, abort=False)),
        Timed(step=10, in_flight=False, event=Close(session=0, abort=True)),
        Timed(
            step=10,
            in_flight=False,
            event=TakeTurn(key=35, session=0, tail=0, own=1, max_new=1, seed=None, keep=None, timeout_s=None),
        ),
    ]
    play(config, script, 11)


def test_launches_in_which_a_lesser_one_may_run_on_are_counted_anew_for_each_that_waits() -> None:
    """Seed 8 of wide: the checker of fairness, not the engine, added up those of two requests that waited."""
    config = WorldConfig(
        page_size=128, num_pages=4, context_len=642, resume_unit="page", policy="priority", overlap=True
    )
    script = [
        Timed(0, False, Arrive(key=1, prompt=Prompt(tail=1, own=168), max_new=20, priority=-2)),
        Timed(1, False, TakeTurn(key=2, session=1, tail=2, own=197, max_new=1)),
        Timed(2, False, TakeTurn(key=3, session=0, tail=1, own=1, max_new=1)),
        Timed(9, False, Arrive(key=4, prompt=Prompt(tail=0, own=205), max_new=1)),
    ]
    play(config, script, 11)


def test_kv_of_a_step_that_went_wrong_is_not_cached_though_its_request_was_aborted_meanwhile() -> None:
    """Seed 138 of trouble: an abort that waited for the result came before the look at whether it was a number."""
    config = WorldConfig(
        page_size=2,
        num_pages=6,
        num_rows=8,
        context_len=16,
        resume_unit="page",
        chunk_tokens=10,
        policy="lpm",
        eviction="slru",
        preemption_threshold=1,
        overlap=True,
    )
    script = [
        Timed(0, True, Arrive(key=0, prompt=Prompt(head=3, shared=2, tail=0, own=10), max_new=1, salt="a")),
        Timed(1, True, AbortRunning(place=0)),
        Timed(2, True, NotFinite(place=1)),
        Timed(3, False, Arrive(key=2, prompt=Prompt(head=3, shared=2), max_new=2, salt="a")),
    ]
    play(config, script, 8)


def test_the_same_without_overlap() -> None:
    config = WorldConfig(page_size=2, num_pages=6, context_len=16)
    script = [
        Timed(0, True, Arrive(key=0, prompt=Prompt(head=3, shared=4), max_new=1)),
        Timed(1, True, AbortRunning(place=0)),
        Timed(1, True, NotFinite(place=0)),
        Timed(3, False, Arrive(key=2, prompt=Prompt(head=3, shared=4), max_new=2)),
    ]
    play(config, script, 8)


def test_a_row_is_forked_where_its_window_is_just_there() -> None:
    """Seed 41 of branches, 27 of windows: one token too many was asked for, so the child began without KV."""
    config = WorldConfig(page_size=2, num_pages=48, context_len=48, chunk_tokens=6, window=2, overlap=True)
    script = [
        Timed(0, True, TakeTurn(key=5, session=3, tail=1, own=2, max_new=1)),
        Timed(5, False, TakeTurn(key=6, session=3, tail=0, own=2, max_new=3)),
        Timed(10, False, Fork(session=3, child=0, tokens=3)),
    ]
    play(config, script, 11)


def test_the_row_of_a_turn_that_is_aborted_gives_back_what_its_window_left() -> None:
    """Seed 1 of chat, 10 of trouble: the last step of such a turn was committed, and its window did not move."""
    config = WorldConfig(page_size=1, window=1)
    script = [
        Timed(0, False, TakeTurn(key=0, session=0, tail=0, own=6, max_new=1)),
        Timed(3, False, BumpWeights()),
        Timed(4, False, TakeTurn(key=1, session=0, tail=1, own=1, max_new=3)),
        Timed(4, True, AbortRunning(place=0)),
    ]
    play(config, script, 8)


def test_a_prompt_whose_windows_went_while_it_ran_is_owed_at_its_end_only() -> None:
    """Seed 30 of windows: the model, not the engine, took a lock to keep all windows of a prefix."""
    config = WorldConfig(
        page_size=2,
        num_pages=24,
        num_rows=1,
        context_len=48,
        chunk_tokens=2,
        window=5,
        eviction="slru",
        conservativeness=0.001,
        overlap=True,
    )
    script = [
        Timed(0, False, Arrive(key=0, prompt=Prompt(shared=6), max_new=4)),
        Timed(0, True, Arrive(key=1, prompt=Prompt(tail=1, own=21), max_new=1)),
        Timed(18, True, Retract(place=1)),
        Timed(19, False, Arrive(key=23, prompt=Prompt(head=3, shared=2, own=12), max_new=24)),
        Timed(20, True, Arrive(key=34, prompt=Prompt(head=3, shared=3, tail=33), max_new=1)),
    ]
    play(config, script, 70)


def test_a_row_that_is_cut_at_a_page_border_may_lack_its_window_there() -> None:
    """Seed 10000119 of chat: the model forgot that the page border is behind the pages that the window left."""
    config = WorldConfig(page_size=16, num_pages=12, context_len=96, resume_unit="page", chunk_tokens=78, window=2)
    script = [
        Timed(0, False, TakeTurn(key=29, session=1, tail=0, own=18, max_new=1)),
        Timed(1, False, TakeTurn(key=30, session=1, tail=1, own=28, max_new=4)),
        Timed(58, False, TakeTurn(key=38, session=1, tail=1, own=1, max_new=1, keep=38)),
    ]
    play(config, script, 59)


def test_a_row_that_is_the_trees_may_lack_its_window_where_the_tree_is_asked() -> None:
    """Seed 20001168 of windows: the model took what the row names for what the tree still has."""
    config = WorldConfig(
        page_size=1,
        num_pages=48,
        num_rows=1,
        context_len=50,
        chunk_tokens=1,
        window=2,
        policy="lpm",
        eviction="priority",
        conservativeness=0.3,
    )
    script = [
        Timed(0, False, TakeTurn(key=14, session=2, tail=1, own=2, max_new=8)),
        Timed(1, False, TakeTurn(key=18, session=1, tail=0, own=2, max_new=5)),
        Timed(2, True, Arrive(key=21, prompt=Prompt(shared=1, tail=21, own=0), max_new=6, stop_after=2)),
        Timed(3, False, AbortRunning(place=1)),
        Timed(4, False, TakeTurn(key=25, session=2, tail=1, own=1, max_new=3)),
        Timed(5, False, Arrive(key=26, prompt=Prompt(head=1, shared=8, own=0), max_new=1, priority=1)),
        Timed(14, True, AbortRunning(place=1)),
        Timed(16, False, AbortRunning(place=1)),
        Timed(17, True, TakeTurn(key=31, session=1, tail=1, own=1, max_new=4)),
        Timed(18, False, Arrive(key=32, prompt=Prompt(own=2, after=28), max_new=4)),
        Timed(18, True, TakeTurn(key=33, session=2, tail=1, own=2, max_new=2)),
        Timed(18, True, AbortRunning(place=1)),
        Timed(22, False, TakeTurn(key=36, session=2, tail=0, own=3, max_new=1)),
        Timed(23, False, Arrive(key=38, prompt=Prompt(tail=1, own=6), max_new=1, priority=1)),
        Timed(23, True, AbortRunning(place=1)),
        Timed(28, False, Arrive(key=39, prompt=Prompt(own=0, after=26), max_new=1)),
        Timed(34, False, TakeTurn(key=41, session=2, tail=0, own=1, max_new=1)),
        Timed(45, True, AbortRunning(place=1)),
        Timed(46, False, TakeTurn(key=51, session=2, tail=1, own=0, max_new=1)),
    ]
    play(config, script, 47)
