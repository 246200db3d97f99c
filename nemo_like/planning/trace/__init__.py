"""One layer traced: its operators, and what it allocates under a choice."""
