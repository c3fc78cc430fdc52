"""What a launcher and the ranks it starts know of each other: logs, stacks, how a rank ended, addresses. Imports no torch."""
