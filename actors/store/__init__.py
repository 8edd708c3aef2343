"""Sessions that outlive the process: what keeps them, and the actor that writes."""
