"""Several services of one office."""

from __future__ import annotations

import threading

from fastcheck_dask.coordination.election import Leadership, Service


def together(*services: Service) -> Service:
    """Return a service that runs several, each in a thread of its own.

    It ends when the first of them ends, and raises what that raised: whoever leads serves everything. The
    others find the office over at their next `Leadership.wait`, and are waited for.
    """

    def serve(leadership: Leadership) -> None:
        ended = threading.Event()
        errors: list[BaseException] = []

        def run(service: Service) -> None:
            try:
                service(leadership)
            except BaseException as error:  # boundary of the thread: raised below
                errors.append(error)
            finally:
                ended.set()

        threads = [
            threading.Thread(target=run, args=(service,), name=f"fastcheck-master-{number}", daemon=True)
            for number, service in enumerate(services)
        ]
        for thread in threads:
            thread.start()
        # The parts give their own signs of life; this one only has to be there.
        while not ended.wait(0.1) and leadership.wait(0.0):
            pass
        leadership.end()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    return serve
