"""A burst on a service that has too little memory for it, and the queue that drains: ``python -m examples.waiting``."""
