// Whose search matches finds how something is done before why it was made so: guides first, then the reference, and
// what is for those who change ctxalloc last. The numbers beside `score` are Sphinx's own.
var Scorer = {
  score: ([page, , , , score]) =>
    /^(decisions|project|files)\/|^development$/.test(page) ? score - 20 : page.includes("/") ? score : score + 10,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
