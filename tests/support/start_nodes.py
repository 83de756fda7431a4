"""python start_nodes.py NODES NODELIST WORD ...: launch/node.sh with the words once for each node, all on this machine.

Stands for srun: hands on SIGUSR1 and SIGTERM, waits for all and returns the highest exit code.
"""

import signal
import subprocess
import sys

import jobs


def main() -> int:
    num_nodes, names, *words = sys.argv[1:]
    assert len(names.split(",")) == int(num_nodes)
    address, count = jobs.free_address(), int(num_nodes)
    commands = [[*jobs.node_command("flags", address, count, node), *words] for node in range(count)]
    processes = [subprocess.Popen(command) for command in commands]
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: [process.send_signal(number) for process in processes])
    return max(code if code >= 0 else 128 - code for code in [process.wait() for process in processes])


if __name__ == "__main__":
    sys.exit(main())
