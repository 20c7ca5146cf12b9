"""`python -m devices`: the doctor's table."""

from devices.doctor import diagnose, report

print(report(diagnose()))
