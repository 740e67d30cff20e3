"""What a doctor makes of the addresses that clients are given."""

from __future__ import annotations

from sava.doctor.observation import Greeting, Level
from tests.unit.doctor.sights import broker, cluster, only, troubles

OURS = Greeting(cluster_id="c", cluster_name="example")
SILENT = Greeting(error="UNAVAILABLE: Connection refused")


def test_a_service_of_another_cluster_is_found_without_a_topic() -> None:
    """Nothing was looked up, so that nobody noticed whose brokers answer."""
    seen = cluster()
    seen.greetings = {"w1:6650": Greeting(cluster_id="d", cluster_name="west")}
    only(seen, Level.ERROR, "clients", "clients come to cluster west (id d) here, and b1:50051 is of another")
    assert "SAVA_SERVICE and SAVA_ADMIN" in troubles(seen)[0].remedy


def test_one_of_several_addresses_leads_nowhere() -> None:
    """The others answered, so that nobody noticed it."""
    seen = cluster()
    seen.is_service_given = True
    seen.greetings = {"b1:6650": OURS, "b9:6650": SILENT}
    only(seen, Level.WARNING, "clients", "a client learns nothing there")
    assert troubles(seen)[0].subject == "b9:6650"


def test_no_address_leads_anywhere() -> None:
    seen = cluster()
    seen.is_service_given = True
    seen.greetings = {"b9:6650": SILENT}
    seen.look_ups = {"/default/a": "refused"}
    only(seen, Level.ERROR, "clients", "a client learns nothing there")


def test_an_admin_port_is_no_client_port() -> None:
    seen = cluster()
    seen.greetings = {"b1:50051": Greeting(error="UNIMPLEMENTED: Method not found!", is_stranger=True)}
    only(seen, Level.ERROR, "clients", "a process answers there that is not the client port of a broker")
    assert "6650 by default" in troubles(seen)[0].remedy


def test_of_a_broker_that_is_down_it_is_said_once() -> None:
    seen = cluster()
    seen.brokers[1].listed.client_addr = "b2:6650"
    seen.greetings = {"b1:6650": OURS, "b2:6650": SILENT}
    assert troubles(seen) == []


def test_clients_that_are_sent_to_nobody() -> None:
    seen = cluster()
    seen.look_ups = {"/default/a": [("/default/a", "x:6650")]}
    only(seen, Level.ERROR, "clients", "clients are sent to x:6650")


def test_without_a_leader_the_address_is_not_to_blame() -> None:
    seen = cluster(*(broker(number, leader=0) for number in (1, 2, 3)))
    seen.look_ups = {"/default/a": "DEADLINE_EXCEEDED"}
    [told] = [finding for finding in troubles(seen) if finding.check == "clients"]
    assert "see what is said of the leader" in told.remedy
