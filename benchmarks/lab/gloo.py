"""What ``horovodrun --gloo`` does, without ssh: a rendezvous server on the first host, and a rank on each.

Runs inside the first host: gloo.py ADDRESS=NAMESPACE... -- COMMAND...
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.http.http_server import RendezvousServer


def main() -> None:
    split = sys.argv.index("--")
    hosts = dict(pair.split("=") for pair in sys.argv[1:split])
    command = sys.argv[split + 1 :]
    server = RendezvousServer(0)
    port = server.start()
    slots = get_host_assignments([HostInfo(address, 1) for address in hosts], len(hosts))
    server.init(slots)
    ranks = []
    for slot in slots:
        env = {"RANK": slot.rank, "SIZE": slot.size, "LOCAL_RANK": slot.local_rank, "LOCAL_SIZE": slot.local_size,
               "CROSS_RANK": slot.cross_rank, "CROSS_SIZE": slot.cross_size, "HOSTNAME": slot.hostname,
               "GLOO_RENDEZVOUS_ADDR": next(iter(hosts)), "GLOO_RENDEZVOUS_PORT": port, "GLOO_IFACE": "eth0",
               "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"}
        ranks.append(subprocess.Popen(["ip", "netns", "exec", hosts[slot.hostname], *command],
                                      env=os.environ | {f"HOROVOD_{key}": str(value) for key, value in env.items()}))
    code = 0
    while ranks and code == 0:  # the first that fails ends the others
        time.sleep(0.1)
        code = next((rank.returncode for rank in ranks if rank.poll()), 0)
        ranks = [rank for rank in ranks if rank.poll() is None]
    for rank in ranks:
        rank.terminate()
    os._exit(code)  # the server's thread would go on


if __name__ == "__main__":
    main()
