"""What of a machine a run would stumble over, found before it does: each check says what is, and how to mend it."""
