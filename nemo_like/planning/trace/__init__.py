"""One layer traced: its operators, and its allocations under a choice."""
