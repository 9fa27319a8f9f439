"""A worker of three that stalls: the others go on without it, and it takes part again. Calls are real."""

import threading
import time

import numpy as np

from mlcn_jax.rounds import link, worker
from mlcn_jax.rounds.meeting import Meeting
from mlcn_jax.rounds.vector import digest, encode
from mlcn_jax.settings import RoundSettings

SIZE = 3
CHANGES = (1.0, 2.0, 100.0)  # of each worker, in every round
STALLS_IN = 1  # the round in which the last worker stalls
MOST_ROUNDS = 100


class Trainer:
    """Stands for that of `worker`, without a model."""

    size, bits, sent = SIZE, 32, ""

    def __init__(self, number):
        self.number, self.goes_on = number, threading.Event()
        self.counted = []  # rounds, and whether the change before counted

    def enter(self, run):
        assert run == "run"

    def start(self):
        return np.ones(SIZE, np.float32)  # not what the run begins with

    def change(self, round_, vector, counted, check):
        self.counted.append((round_, counted))
        if (self.number, round_) == (2, STALLS_IN):
            assert self.goes_on.wait(60)
        elif self.number < 2:
            time.sleep(0.02)
        self.sent = digest(vector, round_)
        return encode(np.full(SIZE, CHANGES[self.number], np.float32), 32), {"loss": 1.0, "accuracy": 0.5}


def follow(port, trainer):
    client = link.Client(f"127.0.0.1:{port}", link.Tls(), lambda: None)
    worker.follow(client, trainer, "run", trainer.number, lambda: None)
    client.close()


def test_three_workers_then_two_then_three(caplog):
    vector = np.zeros(SIZE, np.float32)
    settings = RoundSettings(5, 3, bits=32, quorum=2, patience_seconds=6.0)
    meeting = Meeting(settings, "run", vector, 0, {})
    calls = {"join": meeting.join, "fetch": meeting.fetch, "push": meeting.push}
    server, port = link.serve(calls, "127.0.0.1:0", link.Tls(), 3, 4 * SIZE)
    trainers = [Trainer(i) for i in range(3)]
    threads = [threading.Thread(target=follow, args=(port, each), daemon=True) for each in trainers]
    for thread in threads:
        thread.start()
    rounds = []
    while len(rounds) < MOST_ROUNDS and (len(rounds) < 3 or len(rounds[-1]) < 3):
        changes, _ = meeting.gather(lambda: None)
        rounds.append(list(changes))
        mean = np.mean(list(changes.values()), axis=0)
        assert mean[0] == np.mean([CHANGES[i] for i in changes]).astype(np.float32)
        if len(rounds) == STALLS_IN + 1:
            trainers[2].goes_on.set()
        vector = vector - mean
        meeting.advance(vector, encode(-mean, 32))
    meeting.finish()
    for thread in threads:
        thread.join(20)
    server.stop(None)
    assert rounds[0] == rounds[-1] == [0, 1, 2]
    assert rounds[STALLS_IN:-1] == [[0, 1]] * (len(rounds) - STALLS_IN - 1)
    assert rounds[STALLS_IN:-1], "while it stalls"
    assert sum(message.startswith("worker 2 was late: round 1 ") for message in caplog.messages) == 1
    first, stalled, again, *_ = trainers[2].counted
    assert (first, stalled) == ((0, False), (STALLS_IN, True))
    assert again == (len(rounds) - 1, False)
