"""Processes that do the same work as ranks, each command at the same time."""

import multiprocessing
import os
import socket
import sys
import traceback


class Failed(Exception):
    """A rank could not do what it was told."""


class Ranks:
    """So many processes, each with a `worker(rank, *args)` of its own."""

    def __init__(self, count, threads, worker, *args):
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(count):
            here, there = context.Pipe()
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "LOCAL_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(threads),
                "GLOO_SOCKET_IFNAME": "lo",
            }
            told = (there, environment, worker, rank, args)
            process = context.Process(target=_serve, args=told, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        self._answers()

    def all(self, command, *args):
        """Calls a method of every rank's worker; what each returned."""
        for pipe in self.pipes:
            pipe.send((command, args))
        return self._answers()

    def _answers(self):
        answers = []
        for rank, pipe in enumerate(self.pipes):
            try:
                fine, answer = pipe.recv()
            except EOFError:
                fine, answer = False, "it ended"
            if not fine:
                self.end()
                raise Failed(f"rank {rank}: {answer}")
            answers.append(answer)
        return answers

    def end(self):
        """Ends the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _serve(pipe, environment, worker, rank, args):
    os.environ |= environment
    # Libraries print much; what a rank has to say goes through the pipe.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    try:
        mine = worker(rank, *args)
        pipe.send((True, None))
        while True:
            command, args = pipe.recv()
            pipe.send((True, getattr(mine, command)(*args)))
    except EOFError:
        return
    except BaseException:
        pipe.send((False, traceback.format_exc()))
