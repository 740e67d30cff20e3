"""One node of the replicated store without an event loop: ``replica`` joins the parts."""
