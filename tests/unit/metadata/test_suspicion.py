"""The rules of suspicion, one schedule each. Time is in milliseconds; node 1 is the one that is looked at."""

from __future__ import annotations

from sava.metadata.peer import Doubt, Opinion, Ping
from sava.metadata.suspicion import (
    ANSWER_MS,
    CONFIRMED_MS,
    FLAPS,
    FLOOR_MS,
    LATE_MS,
    PING_MS,
    REFUSED_MS,
    REFUTED_MS,
    Note,
    Sign,
    Suspicion,
)
from sava.raft.types import NodeId

N1, N2, N3, N4, N5 = (NodeId(number) for number in range(1, 6))
TICK = 100
LEASE_MS = 6_000
TERM = 7


class Story:
    """Node 1 of a cluster in which the others send something with every tick, unless they are silent."""

    def __init__(self, nodes: int = 3, *, term: int = TERM) -> None:
        self.leases = {NodeId(number): 100 + number for number in range(1, nodes + 1)}
        self.members = tuple(self.leases)
        self.term = term
        self.now = 10_000
        self.lives = dict.fromkeys(self.members, 1)
        self.silent: set[NodeId] = set()
        self.said: list[tuple[NodeId, object]] = []
        self.notes: list[Note] = []
        self.suspicion = Suspicion(N1, tick_ms=TICK)
        self.suspicion.watch(lambda node: self.leases.get(node, 0), lease_ms=LEASE_MS)
        self.run(1_000)

    def run(self, duration: int) -> None:
        end = self.now + duration
        while self.now < end:
            self.now += TICK
            for node in self.members[1:]:
                if node not in self.silent:
                    self.suspicion.heard(node, self.lives[node], self.now)
            self.suspicion.tick(self.now, self.members, self.term)
            self.collect()

    def collect(self) -> None:
        self.said += self.suspicion.outbox
        self.notes += self.suspicion.notes
        self.suspicion.outbox, self.suspicion.notes = [], []

    def silence(self, node: NodeId) -> None:
        self.silent.add(node)

    def refuse(self, node: NodeId, times: int = 2) -> None:
        self.silent.add(node)
        for _ in range(times):
            self.suspicion.lost(node, self.now, is_refused=True)

    def doubts(self) -> list[tuple[NodeId, Doubt]]:
        return [(node, said) for node, said in self.said if isinstance(said, Doubt)]

    def answer(self, *answers: tuple[NodeId, Sign]) -> None:
        """To the last question."""
        ticket, suspect = self.doubts()[-1][1].ticket, self.doubts()[-1][1].node
        for node, sign in answers:
            self.suspicion.receive(node, Opinion(ticket, suspect, sign), self.now)
        self.collect()

    def kinds(self) -> list[str]:
        return [note.kind for note in self.notes]

    def sign(self, node: NodeId) -> Sign:
        return self.suspicion.sign(node, self.now)


# -- what one node knows ---------------------------------------------------------------------------


def test_a_member_that_sends_is_heard_and_no_one_is_asked_about_it():
    story = Story()
    story.run(5_000)
    assert story.sign(N2) is Sign.HEARD
    assert not story.doubts()


def test_silence_is_unknown_first_and_silent_at_the_threshold():
    story = Story(term=0)
    story.silence(N2)
    story.run(FLOOR_MS // 2)
    assert story.sign(N2) is Sign.UNKNOWN
    story.run(FLOOR_MS // 2)
    assert story.sign(N2) is Sign.SILENT


def test_a_broken_connection_is_neither_life_nor_death():
    story = Story(term=0)
    story.suspicion.lost(N2, story.now, is_refused=False)
    assert story.sign(N2) is Sign.UNKNOWN
    story.run(TICK)
    assert story.sign(N2) is Sign.HEARD


def test_refused_needs_two_refusals_and_a_moment_without_a_message():
    story = Story(term=0)
    story.refuse(N2, times=1)
    story.run(REFUSED_MS + TICK)
    assert story.sign(N2) is Sign.UNKNOWN
    story.suspicion.lost(N2, story.now, is_refused=True)
    assert story.sign(N2) is Sign.REFUSED


def test_a_message_after_a_refusal_takes_it_back():
    """The port is being opened by a process that speaks already: refused twice, then heard."""
    story = Story(term=0)
    story.refuse(N2)
    story.silent.clear()
    story.run(2 * REFUSED_MS)
    assert story.sign(N2) is Sign.HEARD


def test_nodes_that_say_nothing_else_ping_and_those_in_doubt_at_every_tick():
    story = Story(term=0)
    story.said.clear()
    story.run(3_000)
    pings = [node for node, said in story.said if isinstance(said, Ping)]
    # The driver does not report them as sent here, so every tick is due; with the report it is every third.
    assert {N2, N3} == set(pings)
    story.said.clear()
    for _ in range(30):
        story.run(TICK)
        for node, _said in story.said:
            story.suspicion.sent(node, story.now)
    assert len([node for node, _ in story.said if node == N2]) <= 1 + 3_000 // PING_MS
    story.said.clear()
    story.suspicion.lost(N2, story.now, is_refused=False)
    for _ in range(5):
        story.run(TICK)
        story.suspicion.sent(N2, story.now)
    assert len([node for node, _ in story.said if node == N2]) == 5


# -- the threshold ---------------------------------------------------------------------------------


def pause(story: Story, node: NodeId, duration: int) -> None:
    story.silence(node)
    story.run(duration)
    story.silent.discard(node)
    story.run(TICK)


def test_a_pause_doubles_the_threshold_for_ten_minutes():
    """Flapping: a machine that stood still for two seconds gets four, and loses its topics once."""
    story = Story(term=0)
    pause(story, N2, 2_000)
    assert story.suspicion.threshold(N2, story.now) >= 4_000
    assert story.suspicion.threshold(N3, story.now) == FLOOR_MS
    story.run(500_000)
    assert story.suspicion.threshold(N2, story.now) >= 4_000
    story.run(160_000)
    assert story.suspicion.threshold(N2, story.now) == FLOOR_MS


def test_the_threshold_never_exceeds_the_lease():
    story = Story(term=0)
    story.suspicion.watch(lambda node: story.leases.get(node, 0), lease_ms=4_000)
    pause(story, N2, 2_500)
    assert story.suspicion.threshold(N2, story.now) == 4_000


def test_an_outage_does_not_delay_the_next_failover():
    """2 is stopped for four seconds, is evicted after 1.5, and continues as the same process. It is stopped
    again half a minute later, three times: the others must find it as early as the first time."""
    story = Story(term=0)
    for _ in range(FLAPS - 1):
        pause(story, N2, 4_000)
        story.run(30_000)
    assert story.suspicion.threshold(N2, story.now) == FLOOR_MS


def test_outages_that_follow_one_another_are_a_slow_machine():
    story = Story(term=0)
    for _ in range(FLAPS):
        assert story.suspicion.threshold(N2, story.now) == FLOOR_MS
        pause(story, N2, 4_000)
        story.run(5_000)
    assert story.suspicion.threshold(N2, story.now) == LEASE_MS


def test_a_pause_in_which_this_node_heard_less_than_half_was_its_own():
    """The cable of node 1 is pulled for two seconds. 2 and 3 fall silent together, and 3 is heard again a
    moment after 2, when node 1 hears a majority again. Neither of them has shown a pause."""
    story = Story(term=0)
    story.silent = {N2, N3}
    story.run(2_000)
    story.silent = {N3}
    story.run(200)
    story.silent = set()
    story.run(TICK)
    assert story.suspicion.threshold(N2, story.now) == FLOOR_MS
    assert story.suspicion.threshold(N3, story.now) == FLOOR_MS


def test_a_pause_that_began_long_before_this_node_was_alone_counts():
    """2 falls silent, and 3 does so 1.5 s later, for a second: most of the pause of 2 was its own."""
    story = Story(term=0)
    story.silence(N2)
    story.run(1_500)
    story.silence(N3)
    story.run(1_000)
    story.silent = set()
    story.run(TICK)
    assert story.suspicion.threshold(N2, story.now) > 2 * 2_500


def test_an_outage_longer_than_the_lease_is_no_pause():
    """Not even when it is repeated: the lease would have ended too."""
    story = Story(term=0)
    for _ in range(FLAPS):
        pause(story, N2, LEASE_MS + 1_000)
        story.run(2_000)
    assert story.suspicion.threshold(N2, story.now) == FLOOR_MS


def test_a_restart_is_no_pause():
    """2 is killed, and another process of it speaks two seconds later: the network was well."""
    story = Story(term=0)
    story.silence(N2)
    story.run(2_000)
    story.lives[N2] = 2
    story.silent.clear()
    story.run(TICK)
    assert story.suspicion.threshold(N2, story.now) == FLOOR_MS


# -- being asleep itself -----------------------------------------------------------------------------


def test_a_node_that_slept_accuses_no_one():
    """The leader stands still for three seconds and ticks before it has read its sockets."""
    story = Story()
    story.now += 3_000
    story.suspicion.tick(story.now, story.members, TERM)
    story.collect()
    assert not story.notes
    assert story.sign(N2) is Sign.UNKNOWN, "it has not heard it since"
    story.run(TICK)
    assert story.sign(N2) is Sign.HEARD
    assert not story.doubts()


def test_messages_that_waited_while_it_slept_are_not_pauses_of_others():
    story = Story(term=0)
    story.now += 3_000
    story.suspicion.heard(N2, 1, story.now)
    story.suspicion.tick(story.now, story.members, 0)
    assert story.suspicion.threshold(N2, story.now) == FLOOR_MS


def test_small_delays_of_its_own_ticks_are_taken_off_every_silence():
    """Ticks come every 400 ms instead of 100: of 2 s of silence, this node has listened for half a second."""
    story = Story(term=0)
    for _ in range(5):
        story.now += 300 + TICK
        assert LATE_MS > 300
        story.suspicion.tick(story.now, story.members, 0)
    assert story.sign(N2) is not Sign.SILENT


def test_refusals_from_before_its_sleep_do_not_count():
    story = Story()
    story.refuse(N2)
    story.now += 3_000
    story.suspicion.tick(story.now, story.members, TERM)
    assert story.sign(N2) is Sign.UNKNOWN


# -- confirmation ------------------------------------------------------------------------------------


def test_silence_is_confirmed_by_the_majority_of_the_others():
    """Three brokers: the leader and 3 agree about 2."""
    story = Story()
    story.silence(N2)
    story.run(FLOOR_MS)
    assert story.kinds() == ["doubted"]
    assert [node for node, _ in story.doubts()] == [N3]
    story.answer((N3, Sign.SILENT))
    (note,) = [note for note in story.notes if note.kind == "confirmed"]
    assert (note.node, note.lease, note.term, note.sign) == (N2, 102, TERM, Sign.SILENT)


def test_one_that_has_heard_the_suspect_refutes_it():
    story = Story()
    story.silence(N2)
    story.run(FLOOR_MS)
    story.answer((N3, Sign.HEARD))
    story.run(ANSWER_MS)
    assert "confirmed" not in story.kinds()
    assert len(story.doubts()) == 1
    story.run(REFUTED_MS)
    assert len(story.doubts()) == 2, "it is asked again later"


def test_one_that_has_heard_the_suspect_outweighs_any_number_that_have_not():
    story = Story(5)
    story.silence(N2)
    story.run(FLOOR_MS)
    story.answer((N3, Sign.SILENT), (N4, Sign.SILENT), (N5, Sign.HEARD))
    assert "confirmed" not in story.kinds()


def test_no_answer_is_no_confirmation():
    """3 does not answer: with three brokers, nobody but the leader says that 2 is silent."""
    story = Story()
    story.silence(N2)
    story.run(FLOOR_MS + ANSWER_MS + TICK)
    assert "confirmed" not in story.kinds()
    assert "unconfirmed" in story.kinds()


def test_unknown_is_no_confirmation_and_is_asked_again_soon():
    story = Story()
    story.silence(N2)
    story.run(FLOOR_MS)
    story.answer((N3, Sign.UNKNOWN))
    story.run(2 * TICK)
    assert "confirmed" not in story.kinds()
    assert len(story.doubts()) == 2


def test_silence_of_five_needs_two_others():
    story = Story(5)
    story.silence(N2)
    story.run(FLOOR_MS)
    story.answer((N3, Sign.SILENT), (N4, Sign.UNKNOWN), (N5, Sign.UNKNOWN))
    assert "confirmed" not in story.kinds()
    story.run(2 * TICK)
    story.answer((N3, Sign.SILENT), (N4, Sign.SILENT), (N5, Sign.UNKNOWN))
    assert "confirmed" in story.kinds()


def test_refused_connects_are_confirmed_by_one_other_also_among_five():
    story = Story(5)
    story.refuse(N2)
    story.run(REFUSED_MS + TICK)
    story.answer((N3, Sign.REFUSED), (N4, Sign.UNKNOWN), (N5, Sign.UNKNOWN))
    assert "confirmed" in story.kinds()


def test_refused_connects_of_the_leader_alone_are_not_enough():
    """A firewall between the leader and 2 refuses; 3 says nothing against 2."""
    story = Story()
    story.refuse(N2)
    story.run(REFUSED_MS + TICK)
    story.answer((N3, Sign.UNKNOWN))
    assert "confirmed" not in story.kinds()


def test_a_suspect_that_is_heard_before_the_answer_is_let_go():
    """The question is on its way, 2 speaks again, then 3 confirms that it had been silent."""
    story = Story()
    story.silence(N2)
    story.run(FLOOR_MS)
    story.suspicion.heard(N2, 1, story.now)
    story.answer((N3, Sign.SILENT))
    assert "confirmed" not in story.kinds()


def test_the_lease_is_the_one_of_when_the_doubt_began():
    """2 dies and is back under another lease while 3 is asked: what is confirmed is about the former one."""
    story = Story()
    story.silence(N2)
    story.run(FLOOR_MS)
    story.leases[N2] = 999
    story.answer((N3, Sign.SILENT))
    assert [note.lease for note in story.notes if note.kind == "confirmed"] in ([], [102])


def test_an_answer_to_an_earlier_question_does_not_count():
    story = Story()
    story.silence(N2)
    story.run(FLOOR_MS)
    first = story.doubts()[-1][1].ticket
    story.answer((N3, Sign.UNKNOWN))
    story.run(2 * TICK)
    story.suspicion.receive(N3, Opinion(first, N2, Sign.SILENT), story.now)
    story.collect()
    assert "confirmed" not in story.kinds()


def test_a_sign_of_a_later_version_is_no_answer():
    story = Story()
    story.silence(N2)
    story.run(FLOOR_MS)
    story.suspicion.receive(N3, Opinion(story.doubts()[-1][1].ticket, N2, 99), story.now)
    story.collect()
    assert "confirmed" not in story.kinds()


def test_a_leader_that_hears_no_majority_does_nothing():
    """Of five, two are silent and two refuse: the leader itself is cut off, or the cluster is lost."""
    story = Story(5)
    for node in (N2, N3):
        story.silence(node)
    for node in (N4,):
        story.refuse(node)
    story.run(2 * FLOOR_MS)
    assert not [said for _, said in story.doubts() if said.node == N3 and story.now > 0][2:]
    assert "withheld" in story.kinds()
    assert "confirmed" not in story.kinds()


def test_of_two_brokers_neither_ends_the_others_lease():
    story = Story(2)
    story.refuse(N2)
    story.run(4_000)
    assert "confirmed" not in story.kinds()


def test_a_follower_asks_no_one():
    story = Story(term=0)
    story.silence(N2)
    story.run(3_000)
    assert not story.doubts()


def test_a_broker_without_a_registration_is_not_suspected():
    story = Story()
    story.leases[N2] = 0
    story.silence(N2)
    story.run(3_000)
    assert not story.notes


def test_a_new_term_begins_with_the_evidence_of_the_node_and_new_doubts():
    """The leader was a follower when the old one died: it suspects it with its first tick."""
    story = Story(term=0)
    story.refuse(N2)
    story.run(1_000)
    story.term = TERM + 1
    story.run(TICK)
    story.answer((N3, Sign.REFUSED))
    assert [note.term for note in story.notes if note.kind == "confirmed"] == [TERM + 1]


def test_an_answer_from_an_earlier_term_does_not_count():
    """The leader is deposed while it waits for 3, and leads again: it asks again."""
    story = Story()
    story.silence(N2)
    story.run(FLOOR_MS)
    first = story.doubts()[-1][1].ticket
    story.term = TERM + 2
    story.run(TICK)
    assert story.doubts()[-1][1].ticket != first
    story.suspicion.receive(N3, Opinion(first, N2, Sign.SILENT), story.now)
    story.collect()
    assert "confirmed" not in story.kinds()


def test_a_confirmed_suspicion_is_told_again_while_it_lasts():
    """The write that ends the lease may have failed."""
    story = Story()
    story.silence(N2)
    story.run(FLOOR_MS)
    story.answer((N3, Sign.SILENT))
    story.run(CONFIRMED_MS + TICK)
    story.answer((N3, Sign.SILENT))
    assert story.kinds().count("confirmed") == 2


def test_a_node_that_is_asked_says_what_it_knows_and_looks_at_once():
    story = Story(term=0)
    story.refuse(N2)
    story.run(REFUSED_MS + TICK)
    story.said.clear()
    story.suspicion.receive(N3, Doubt(5, N2), story.now)
    assert story.suspicion.outbox == [(N3, Opinion(5, N2, Sign.REFUSED))]
