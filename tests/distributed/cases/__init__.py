"""What people do to models, as small cases: every mode must train like one unsharded process, or say why it cannot."""
