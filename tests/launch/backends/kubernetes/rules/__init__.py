"""Rules for rendered objects that no schema states, applied to goldens, recipes and random specs."""
