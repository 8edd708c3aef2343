import{b as a}from"./chunk-A56L2R2J.js";import"./chunk-OPZDJM37.js";import"./chunk-OOJM4CTU.js";export{a as Answer};
