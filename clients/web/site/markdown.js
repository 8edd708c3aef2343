import{b as a}from"./chunk-LANDQHPK.js";import"./chunk-FKXVPIRQ.js";import"./chunk-OOJM4CTU.js";export{a as Answer};
