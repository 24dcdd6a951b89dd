"""From processes to one run: ranks find each other, agree, stay in touch, and report one failure once."""
